"""Processes that outlive the one that started them become children of the nearest ancestor that adopts orphans
(prctl(2)): the `baton` process does, learns how they ended, and leaves no zombies. Linux only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def adopt_orphans(adopts: bool = True) -> bool:
    """From now on, descendants of this process whose parents end are its children; whether they were before."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    return bool(before.value)


class Reaper:
    """On one event loop. `ended` is called with the process id and how a watched process ended: its exit code, or a
    signal as a negative number."""

    def __init__(self, ended: Callable[[int, int], None]) -> None:
        self._ended = ended
        self._watched: dict[int, int] = {}
        self._seen: set[int] = set()

    def watch(self, pid: int) -> None:
        if pid in self._watched:
            return
        with suppress(OSError):  # it has ended, and was no child
            descriptor = self._watched[pid] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(descriptor, self._reap, pid)

    def reap_strays(self) -> None:
        """Children that ended before the previous call, and that whoever started them has not waited for since."""
        zombies = {pid for pid in _children() if pid not in self._watched and _is_zombie(pid)}
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies

    def kill_strays(self, title: bytes) -> None:
        """Children that are titled so, and were started by a process that has ended."""
        for pid in _children():
            with suppress(OSError):
                if pid not in self._watched and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for pid in tuple(self._watched):
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        with suppress(ChildProcessError):  # another one's child
            if (told := os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)) is not None:
                self._ended(pid, told.si_status if told.si_code == os.CLD_EXITED else -told.si_status)
        os.close(descriptor)


def _children() -> list[int]:
    try:
        lists = [task.read_text() for task in Path("/proc/self/task").glob("*/children")]
    except OSError:
        return []
    return [int(pid) for line in lists for pid in line.split()]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
