"""A client that opens a stream and never reads it is taken for gone: it does not hold a seat for ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from protos.errors import Cancelled
from router.openai.sse import EventStream, Way
from router.outlet import HttpProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Answer:
    """More events than any socket's buffers hold; it says how it ended."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_closed = False
        self.ended = asyncio.Event()

    async def events(self, way: Way) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: " + b"x" * 1_000_000 + b"\n\n"
        finally:
            self.is_closed = True

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.ended.set()


async def test_a_client_that_takes_nothing_is_cut_and_its_answer_ends() -> None:
    answer = Answer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(answer.events, cast("Any", answer), stall_s=0.05)(scope, receive, send)

    config = uvicorn.Config(app, log_level="critical", lifespan="off", http=HttpProtocol)
    config.load()
    state, protocol = ServerState(), cast("Any", config.http_protocol_class)
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), host="127.0.0.1", port=0
    )
    with closing(server), socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(server.sockets[0].getsockname())
        silent.sendall(REQUEST)
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert answer.is_closed
        assert isinstance(answer.error, Cancelled)
        assert "has taken nothing for 0.05 s" in answer.error.message
        assert not state.connections, "the connection has ended, too"
