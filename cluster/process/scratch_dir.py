"""A folder that lives as long as a process. Folders of processes that were killed, and of ranks on a Ray cluster's
nodes, which end after their supervisor, are removed when the next one is made. `kill_users` ends the processes that use
a folder."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.process.reaper import adopt_orphans
from protos.errors import Misconfigured

PREFIX = "baton-"
OWNED = "owned"  # locked by the processes that use the folder; the kernel releases the lock when the last of them ends
REAP_S = 1.0  # killed processes end immediately, unless a driver holds them

log = logging.getLogger("baton.cluster")


class Scratch:
    """Makes a new folder in `parent`. Folders there whose owners are gone are removed first."""

    def __init__(self, parent: Path, shared: str | None = None) -> None:
        """`shared`: the name of a folder that others may use after this process, or "" for a new one."""
        _sweep(parent)
        self.path = parent / shared if shared else Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.lock = ""
        self._lock: int | None
        if shared is not None:
            self._lock = share(self.path)
            return
        beginning = self.path / f"{OWNED}.new"
        lock = os.open(beginning, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._lock, self.lock = lock, str(self.path / OWNED)
        fcntl.flock(lock, fcntl.LOCK_EX)
        beginning.rename(self.path / OWNED)  # locked before another process can see it

    def remove(self) -> None:
        """Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def share(folder: Path) -> int:
    """Makes a folder that several processes use, or joins it. The folder stays until every process that has the
    returned descriptor, or inherited it, has ended. Raises Misconfigured if another user could write there."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise Misconfigured(f"{folder} must be a folder that only this user may use: remove it")
        with suppress(FileNotFoundError):  # another process has just removed the folder
            lock = os.open(folder / OWNED, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), (folder / OWNED).stat()):
                    return lock
            os.close(lock)


def kill_users(folder: Path) -> None:
    """Kills every process that has the folder in its command line, and their descendants, except this process. Reaps
    those that descend from this process: in containers without an init they would stay zombies. Linux only."""
    killed: list[int] = []
    with _adopting():
        for pid in _users(folder):
            with suppress(OSError):  # it has just ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        for pid in (*killed, *killed):  # the second pass takes processes whose parents the first one killed
            with suppress(OSError):  # no child of this process, or reaped already
                _reap(pid)


def programs(folder: Path, *, parent: int | None = None) -> Iterator[tuple[int, str]]:
    """Ids and names of processes with the folder in their command lines; with `parent` only its children."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (entry / "cmdline").read_bytes()
            if os.fsencode(folder) in command and parent in (None, _parent(entry)):
                yield int(entry.name), Path(os.fsdecode(command.partition(b"\0")[0])).name


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _users(folder: Path) -> list[int]:
    """Finds processes that use the folder, with their descendants: Ray's agents replace their command lines."""
    parents: dict[int, int] = {}
    users: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = _parent(entry)
            if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                users.add(int(entry.name))
    users.discard(os.getpid())
    while more := {pid for pid, parent in parents.items() if parent in users} - users - {os.getpid()}:
        users |= more
    return sorted(users)


@contextmanager
def _adopting() -> Iterator[None]:
    """While open, orphaned descendants become children of this process."""
    before = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(before)


def _reap(pid: int) -> None:
    """Raises ChildProcessError for a process that is no child of this one."""
    if os.waitpid(pid, os.WNOHANG)[0]:
        return
    end = os.pidfd_open(pid)
    try:
        select.select([end], [], [], REAP_S)
        os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(end)


def _sweep(parent: Path) -> None:
    for owned in sorted(parent.glob(f"{PREFIX}*/{OWNED}")):
        with suppress(OSError):  # in use, another user's, or just removed
            if owned.parent.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(owned, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s: the processes that used it have ended", owned.parent)
                shutil.rmtree(owned.parent, ignore_errors=True)
            finally:
                os.close(lock)
