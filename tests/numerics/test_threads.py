"""The threads of the CPU's kernels, in processes of their own: exact bits when threads are held, many, or gone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from workers.kernels.cpu.native_build import native

pytestmark = [
    pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler: torch computes"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds threads in /proc"),
]

PROGRAM = """
import ctypes, os, signal, threading
import torch
from workers.kernels.cpu.products import PackedFloats

def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()

def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}

product, x = PackedFloats(normal(640, 1024)), normal(40, 1024)
torch.set_num_threads(1)
expected = product(x)
before = threads()

def is_exact(num_threads):
    torch.set_num_threads(num_threads)
    return torch.equal(product(x), expected)
"""

HELD = """
libc = ctypes.CDLL(None)
libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))  # a thread that handles it stays in its handler
libc.signal(signal.SIGUSR2, ctypes.cast(libc.getpid, ctypes.c_void_p))  # until it handles this one

def is_held(thread):
    with open(f"/proc/self/task/{thread}/status") as status:
        blocked = next(line.split()[1] for line in status if line.startswith("SigBlk"))
    return int(blocked, 16) >> signal.SIGUSR1 - 1 & 1

def send(thread, number):
    assert libc.tgkill(os.getpid(), thread, number) == 0

assert is_exact(3)
workers = sorted(threads() - before)
assert len(workers) == 2, workers
for held in ([workers[0]], [workers[1]], workers):
    for thread in held:
        send(thread, signal.SIGUSR1)
        while not is_held(thread):
            os.sched_yield()
    assert all(is_exact(3) for _ in range(5))
    for thread in held:
        while is_held(thread):
            send(thread, signal.SIGUSR2)
            os.sched_yield()
assert all(is_exact(3) for _ in range(5))
"""

MANY = """
for num_threads in (2, 3, 4 * os.cpu_count() + 3, 2):
    assert all(is_exact(num_threads) for _ in range(20))
    assert len(threads() - before) == num_threads - 1
"""

EXITING = """
results = []
for _ in range(3):
    callers = [threading.Thread(target=lambda: results.append(is_exact(3))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
assert results == [True] * 6
while threads() - before:  # a thread ends its own behind `join`
    os.sched_yield()
"""

FORKED = """
assert is_exact(3)
child = os.fork()
if child == 0:
    os._exit(0 if is_exact(3) and is_exact(2) and len(threads()) == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_exact(3)
"""


@pytest.mark.parametrize("more", [HELD, MANY, EXITING, FORKED], ids=["held", "many", "exiting", "forked"])
def test_threads_that_are_held_many_or_gone_change_no_bit(more: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM + more], check=True)
