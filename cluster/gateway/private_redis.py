"""A redis-server for the gateway processes of one machine: on a Unix socket, without files, ended with this process."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from protos.errors import Misconfigured, Unavailable
from router.prefix.redis_url import PASSWORD_VARIABLE, TROUBLES, close, parse

log = logging.getLogger("baton.cluster")

PROGRAM = "redis-server"
START_S = 10.0
LOOK_S = 0.05
PAUSE_S = 0.5
PR_SET_PDEATHSIG = 1
LAUNCH = "from cluster.gateway.private_redis import launch; launch()"


class PrivateRedis:
    """On one event loop: `start` and `close` it. A server that dies is started again, empty, at the same socket."""

    def __init__(self, folder: Path) -> None:
        """Raises Misconfigured without a redis-server on this machine."""
        if shutil.which(PROGRAM) is None:
            raise Misconfigured(
                f"several gateway processes share what they know through Redis, and there is no {PROGRAM} on this "
                "machine: install the package redis-server (Debian, Ubuntu) or redis (Fedora, Alpine, Homebrew), "
                "name a Redis with --index, or run one process (--processes 1)",
                param="processes",
            )
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the server answers. Raises Unavailable if it does not."""
        self._running = asyncio.create_task(self._keep_running(), name=PROGRAM)
        client = parse(self.url, setting="index").client(timeout_s=1.0)
        try:
            for _ in range(int(START_S / LOOK_S)):
                if await _answers(client):
                    return
                await asyncio.sleep(LOOK_S)
            raise Unavailable(f"{PROGRAM} does not answer at {self._socket} after {START_S:g} s")
        finally:
            await close(client)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _keep_running(self) -> None:
        logfile = self._socket.with_suffix(".log")
        settings = ["port 0", f"unixsocket {self._socket}", "unixsocketperm 600", 'save ""', f"logfile {logfile}"]
        if password := os.environ.get(PASSWORD_VARIABLE):  # clients send it to every server
            escaped = "".join(f"\\x{byte:02x}" for byte in password.encode())
            settings.append(f'requirepass "{escaped}"')
        while True:
            server = await asyncio.create_subprocess_exec(
                sys.executable, "-c", LAUNCH, str(os.getpid()), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                await server.communicate("\n".join(settings).encode())
            finally:
                with suppress(ProcessLookupError):
                    server.kill()
                await server.wait()
            log.warning("%s has ended with exit code %s: starting it again", PROGRAM, server.returncode)
            await asyncio.sleep(PAUSE_S)


async def _answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except TROUBLES:
        return False


def launch() -> None:
    """Becomes a redis-server that the kernel ends with its parent (the argument is the parent's id). It reads its
    settings from stdin, since arguments are visible in the list of processes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):
        os.execlp(PROGRAM, PROGRAM, "-")
