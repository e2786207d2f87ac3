"""Starts a process that survives the end of its parent and signals to its parent's group. The parent imports nothing
before it forks, so a caller waits only milliseconds for the process id."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Starts a detached process. `argv`: a module and the arguments of its `main`. Writes the process's id to
    stdout."""
    if pid := os.fork():
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    from importlib import import_module

    import_module(sys.argv[1]).main(sys.argv[2:])
