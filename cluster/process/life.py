"""One life of a process that this one has started and talks with over a channel, until it ends or stops answering."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine
from contextlib import suppress
from typing import IO, Any


async def live(process: Process, follow: Coroutine[Any, Any, None], silent: Coroutine[Any, Any, None]) -> int:
    """Returns the exit code, negative for a signal. `follow` handles the process's messages up to the last. The process
    is killed when `silent` returns or the caller is cancelled."""
    following, watching = asyncio.create_task(follow), asyncio.create_task(silent)
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([ended, watching], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await following
    finally:
        for task in (following, watching):
            task.cancel()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(ended, following, watching, return_exceptions=True)
    return process.returncode or 0


async def spawn(program: str, *inherited: int, errors: IO[bytes] | None = None) -> tuple[Process, socket.socket]:
    """Starts a Python process whose arguments are the descriptors of a socket and those `inherited`. It writes its
    output to `errors`, if given. Returns it with our end of the socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            descriptors = theirs.fileno(), *inherited
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, *map(str, descriptors), pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
            )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    return process, ours
