"""Adopts orphans (prctl(2), child subreaper): processes that outlive their parent become children of the `baton`
process, which learns their exit status and leaves no zombies. Linux only."""

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
    """From now on, descendants whose parents end become children of this process. Returns whether they did before."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    return bool(before.value)


class Reaper:
    """Lives on one event loop. Calls `ended` with the id of a watched process and its exit code, or a signal as a
    negative number."""

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
        """Reaps zombies that also existed at the previous call: their own parent code had time to wait for them."""
        zombies = {pid for pid in _children() if pid not in self._watched and _is_zombie(pid)}
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies

    def kill_strays(self, title: bytes) -> None:
        """Children with this title whose first parent has ended."""
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
        with suppress(ChildProcessError):  # a child of another process
            if (status := os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)) is not None:
                self._ended(pid, status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)
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
