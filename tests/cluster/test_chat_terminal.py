"""`baton chat` in a real terminal: a process under a pseudo terminal, a person who types, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from router.jobs import Job, TokenDelta
from tests.unit.router.scripted import Scripted, Step, ids_of, make_gateway, saying, serving

pytestmark = pytest.mark.cluster
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Screen:
    """The output of the process, and keys for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    async def shows(self, text: str) -> None:
        """Returns when it has appeared after what was waited for before."""
        async with asyncio.timeout(60):
            while text not in self._text:
                self._changed.clear()
                await self._changed.wait()
        self._text = self._text.partition(text)[2]

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self._text += data.decode("utf-8", "replace")
        self._changed.set()


@asynccontextmanager
async def chatting(url: str) -> AsyncIterator[tuple[Screen, asyncio.subprocess.Process]]:
    ours, theirs = pty.openpty()
    program = ("-c", "from cluster.cli.main import main; main()", "chat", "--url", url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"},
        preexec_fn=lambda: os.login_tty(theirs),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Screen(ours), process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


async def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_conversation() -> None:
    never = asyncio.Event()

    def endless_then_short(job: Job) -> Iterator[Step]:
        if len(generate.jobs) == 1:
            yield TokenDelta(token_ids=tuple(ids_of("hello world")))
            yield never
        else:
            yield from saying("lazy dog")(job)

    generate = Scripted(endless_then_short)
    async with serving(make_gateway(generate)) as url, chatting(url) as (screen, process):
        await screen.shows("> ")
        screen.type(b"hi\r")
        await screen.shows("hello world")
        screen.type(CTRL_C)
        await screen.shows("(stopped)")
        async with asyncio.timeout(60):
            await generate.idle.wait()  # the gateway has ended the work, too
        await screen.shows("> ")
        screen.type(b"again\r")
        await screen.shows("lazy dog")
        await screen.shows("> ")
        screen.type(CTRL_D)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
