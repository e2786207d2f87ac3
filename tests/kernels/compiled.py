"""Compiles every kernel as its launcher would, for a GPU that need not be there, and says what each costs.

    python -m tests.kernels.compiled 90 bfloat16 [LAUNCH ...]

prints one JSON line a kernel, of all launches or of those named; 90 is the compute capability without its point.

Run without TRITON_INTERPRET. Nothing is launched: a stand-in for the driver names the target.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.kernels.launches import LAUNCHES
from workers.kernels import this_device

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_MATRIX_UNITS = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)")


class NamesTarget:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


MAX_SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes a program may have (CUDA C++ Programming Guide, technical specifications by compute capability). 8.0 itself has
163 KiB; 8.6 and 8.9, which run the same code, have 99."""

COUNTED = {"4 bits, 1 rows"}
"""Launches whose loop is counted: to disassemble a kernel takes as long as to compile one."""


def compile_all(capability: int, dtype: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    triton.runtime.driver.set_active(NamesTarget(capability))
    this_device.capability = lambda: capability  # type: ignore[assignment]
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(run(self, *args, **{**options, "warmup": True}))

    JITFunction.run = compile_only
    for name in names or LAUNCHES:
        kernels.clear()
        LAUNCHES[name](getattr(torch, dtype))
        for kernel in kernels:
            yield {"launch": name, "dtype": dtype, **_cost(kernel, counted=name in COUNTED)}


def _loop_length(code: str) -> int:
    """Instructions of the shortest loop with a matrix instruction in it; 0 if there is none."""
    listed = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(code)]
    lengths = []
    for place, text in listed:
        match = _BRANCH.search(text)
        if match and int(match[1], 16) < place:
            body = [other for where, other in listed if int(match[1], 16) <= where <= place]
            if any("MMA" in other for other in body):
                lengths.append(len(body))
    return min(lengths, default=0)


def _cost(kernel: Any, *, counted: bool) -> dict[str, Any]:
    """Registers and spilled bytes a thread, bytes of shared memory and columns of tensor memory, which matrix
    instructions, and how many groups of asynchronous copies may still be under way where the kernel waits for one;
    instructions of a step's loop, if `counted`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([_CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
        code = ""
        if counted:
            code = subprocess.check_output([_CUOBJDUMP, "-sass", file.name], text=True, stderr=subprocess.DEVNULL)
    match = _USAGE.search(usage)
    assert match, usage
    registers, stack, local = (int(number) for number in match.groups())
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.name,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "spilled": stack + local,
        "shared": kernel.metadata.shared,
        "matrix": next((unit for unit, text in _MATRIX_UNITS.items() if text in ptx), ""),
        "columns": getattr(kernel.metadata, "tmem_size", 0) or 0,
        "loop": _loop_length(code),
        "under_way": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
    }


if __name__ == "__main__":
    for cost in compile_all(int(sys.argv[1]), sys.argv[2], sys.argv[3:]):
        print(json.dumps(cost))
