"""A folder for as long as a process lives; those whose processes were killed before they could clean up are ended."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "baton-"
OWNED = "owned"  # locked by whoever uses the folder: the kernel lets go of it when that process ends, however it does

log = logging.getLogger("baton.cluster")


class Scratch:
    """A new folder in `parent`. Folders there whose owners are gone are removed first."""

    def __init__(self, parent: Path) -> None:
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        beginning = self.path / f"{OWNED}.new"
        lock = os.open(beginning, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._lock: int | None = lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        beginning.rename(self.path / OWNED)  # locked before anybody else can see it

    def remove(self) -> None:
        """May be called again."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def kill_users(folder: Path) -> None:
    """Every process that was told of the folder when it was started, but not this one. Linux only."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # just gone, or another user's
            if entry.name != str(os.getpid()) and os.fsencode(folder) in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _sweep(parent: Path) -> None:
    for owned in sorted(parent.glob(f"{PREFIX}*/{OWNED}")):
        with suppress(OSError):  # in use, another user's, or just gone
            lock = os.open(owned, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("%s is what a killed Baton left behind: it is removed", owned.parent)
                shutil.rmtree(owned.parent, ignore_errors=True)
            finally:
                os.close(lock)
