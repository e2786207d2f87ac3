"""A process that belongs to no other: neither the end of the process that started it nor a signal to that one's group
ends it. Imports nothing before it has left, so that whoever waits for its process id waits for milliseconds."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """`argv`: a module, then the arguments of its `main`. Writes the process id of the one that goes on to stdout."""
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
