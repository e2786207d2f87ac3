"""An OpenAI-compatible server on a Unix socket that follows a script, delays included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from cluster.bench.http import Connection

Step = float | bytes | None
"""A delay in seconds, bytes to send, or None: cut the connection."""

Script = Callable[[dict[str, Any]], Sequence[Step]]


def sse(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else orjson.dumps(content)) + b"\n\n"


def chunk(*token_ids: int, finish: str | None = None, text: str = "x") -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": list(token_ids)}
    return sse({"choices": [choice]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    told: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return sse({"choices": [], "usage": told})


DONE = sse(b"[DONE]")


def answer(*steps: Step) -> list[Step]:
    """A streamed reply: headers, the steps as chunks, the end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    body: list[Step] = [b"%x\r\n%b\r\n" % (len(step), step) if isinstance(step, bytes) else step for step in steps]
    return [head, *body, b"0\r\n\r\n"]


def refusal(status: int, message: str, *, code: str | None = None, param: str | None = None) -> list[Step]:
    body = orjson.dumps({"error": {"message": message, "code": code, "param": param}})
    return [b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)]


@dataclass(slots=True)
class FakeServer:
    """`bodies` are what was asked, in order; `hung_up` counts clients that left in the middle of an answer."""

    script: Script
    path: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    num_running: int = 0
    max_running: int = 0
    hung_up: int = 0
    visits: list[Any] = field(default_factory=list)

    async def open_one(self, protocol: Callable[[], Connection]) -> Connection:
        _, made = await asyncio.get_running_loop().create_unix_connection(protocol, self.path)
        return made

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.visits.append(asyncio.current_task())
        try:
            while head := await _read_head(reader):
                length = int(next(line for line in head if line.lower().startswith(b"content-length")).split(b":")[1])
                self.bodies.append(orjson.loads(await reader.readexactly(length)))
                self.num_running += 1
                self.max_running = max(self.max_running, self.num_running)
                try:
                    if not await self._play(self.script(self.bodies[-1]), reader, writer):
                        return
                finally:
                    self.num_running -= 1
        finally:
            writer.close()

    async def _play(self, steps: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is still of use."""
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            for step in steps:
                match step:
                    case None:
                        return False
                    case bytes():
                        writer.write(step)
                    case _:
                        if await _first(leaving, asyncio.sleep(step)):
                            self.hung_up += 1
                            return False
            return True
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def _first(one: asyncio.Future[Any], other: Awaitable[None]) -> bool:
    """Whether `one` came first."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait({one, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return one.done()
    finally:
        waiting.cancel()


async def _read_head(reader: asyncio.StreamReader) -> list[bytes]:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return []


@asynccontextmanager
async def serving(script: Script, folder: Path) -> AsyncIterator[FakeServer]:
    fake = FakeServer(script=script, path=str(folder / "s"))
    server = await asyncio.start_unix_server(fake.serve, fake.path)
    try:
        yield fake
    finally:
        server.close()
        await asyncio.gather(*fake.visits)  # a client that keeps a connection open keeps the test waiting
