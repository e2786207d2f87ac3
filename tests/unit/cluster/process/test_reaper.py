"""How processes end that outlived the one that started them. In a process of its own: it adopts orphans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ADOPTING = """
import asyncio, os, subprocess, sys
from cluster.process.reaper import Reaper, adopt_orphans

CHILD = "import sys; sys.stdin.read(); sys.exit(3)"
PARENT = (
    "import subprocess, sys; "
    "print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.DEVNULL).pid)"
)

async def main():
    adopt_orphans()
    ended = asyncio.Queue()
    reaper = Reaper(lambda *how: ended.put_nowait(how))
    reading, writing = os.pipe()
    def orphan():
        return int(subprocess.check_output([sys.executable, "-c", PARENT, CHILD], stdin=reading))
    watched, stray = orphan(), orphan()
    reaper.watch(watched)
    os.close(reading)
    os.close(writing)
    assert await asyncio.wait_for(ended.get(), 60) == (watched, 3)
    while open(f"/proc/{stray}/stat").read().rpartition(")")[2].split()[0] != "Z":
        await asyncio.sleep(0.01)
    reaper.reap_strays()
    assert os.path.exists(f"/proc/{stray}"), "whoever has started it may wait for it still"
    reaper.reap_strays()
    assert not os.path.exists(f"/proc/{stray}")

asyncio.run(main())
"""

TITLED = """
import subprocess, sys
from cluster.process.reaper import Reaper

def child(title):
    return subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)

titled, other = child("ray::IDLE"), child("python")
Reaper(print).kill_strays(b"ray::")
assert titled.wait() == -9
assert other.poll() is None
other.communicate(b"\\n")
"""


def test_children_of_a_title_are_killed_and_no_others() -> None:
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", TITLED], cwd=root, check=True, timeout=100)


def test_adopted_processes_are_reaped_with_their_exit_status() -> None:
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", ADOPTING], cwd=root, check=True, timeout=100)
