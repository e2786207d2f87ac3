"""A client that takes its time, or never ends: told so in the API's words, and its connection is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from router import intake
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

BODY = json.dumps({"model": "tiny", "prompt": "hello", "stream": True}).encode()
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
WHOLE = LINE + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
NEVER_S, SOON_S = 1000.0, 0.05


class Caller:
    """A client that sends what it is told to, and reads to the end of its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def told(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body) of the last thing that was said before the connection ended."""
        async with asyncio.timeout(30):
            everything = await self.reader.read()
        head, _, body = everything[everything.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        return int(status.split()[1]), dict(line.split(b": ", 1) for line in lines), body

    async def error(self) -> tuple[int, dict[str, Any]]:
        status, headers, body = await self.told()
        assert headers[b"connection"] == b"close"
        return status, dict(json.loads(body)["error"])


@asynccontextmanager
async def calling(generate: Scripted | None = None, **changes: Any) -> AsyncIterator[Caller]:
    async with serving(make_gateway(generate or Scripted(saying("hi")), **changes)) as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        yield Caller(reader, writer)
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\n"])
async def test_a_body_that_has_no_end_is_refused(framing: bytes) -> None:
    async with calling(body_timeout_s=SOON_S) as caller:
        caller.writer.write(LINE + framing + b'{"a":')
        status, error = await caller.error()
    assert (status, error["code"], error["type"]) == (408, "request_timeout", "invalid_request_error")
    assert "no end within 0.05 s of its headers (5 bytes came)" in error["message"]


async def test_a_body_that_comes_in_time_may_come_in_pieces_and_its_answer_may_take_longer() -> None:
    go_on = asyncio.Event()
    generate = Scripted(lambda job: [go_on, *saying("hi")(job)])
    async with calling(generate=generate, body_timeout_s=NEVER_S) as caller:
        head, _, body = WHOLE.partition(b"\r\n\r\n")
        for piece in (head, b"\r\n", b"\r\n", body[:9], body[9:]):
            caller.writer.write(piece)
            await caller.writer.drain()
        await generate.began.wait()
        go_on.set()
        assert (await caller.reader.readline()).endswith(b" 200 OK\r\n")
        await caller.reader.readuntil(b"data: [DONE]")


@pytest.mark.parametrize(("sent", "status"), [(b"", None), (LINE + b"x-a: ", 408), (WHOLE + LINE, 408)])
async def test_a_head_that_has_no_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int | None
) -> None:
    monkeypatch.setattr(intake, "HEAD_S", SOON_S)
    async with calling() as caller:
        caller.writer.write(sent)
        if status is None:
            assert await asyncio.wait_for(caller.reader.read(), 30) == b"", "it never said anything"
            return
        told, error = await caller.error()
    assert (told, error["code"]) == (status, "request_timeout")


async def test_ends_of_lines_after_an_answer_are_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with calling() as caller:
        caller.writer.write(WHOLE)
        await caller.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        monkeypatch.setattr(intake, "HEAD_S", SOON_S)
        caller.writer.write(b"\r\n")
        status, error = await caller.error()
    assert (status, error["code"]) == (408, "request_timeout")


async def test_a_client_that_leaves_a_pipeline_leaves_all_of_its_requests() -> None:
    generate = Scripted(lambda job: [asyncio.Event()])
    async with calling(generate=generate, keep_alive_s=SOON_S) as caller:
        caller.writer.write(WHOLE + WHOLE)
        assert (await caller.reader.readline()).endswith(b" 200 OK\r\n")
        caller.writer.transport.abort()
        await asyncio.wait_for(generate.idle.wait(), 30)  # its comments reach nobody
    assert len(generate.jobs) == 1, "the other one does not begin"


async def test_a_head_is_not_waited_for_while_an_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "HEAD_S", SOON_S)
    go_on, waited = asyncio.Event(), asyncio.Event()
    late = intake.Intake._late

    def noted(self: intake.Intake) -> None:
        waited.set()
        late(self)

    monkeypatch.setattr(intake.Intake, "_late", noted)
    generate = Scripted(lambda job: [go_on, *saying("hi")(job)])
    async with calling(generate=generate) as caller:
        caller.writer.write(WHOLE + LINE)  # the next request's head begins, and goes no further
        await waited.wait()
        go_on.set()
        await caller.reader.readuntil(b"data: [DONE]")
        assert (await caller.told())[0] == 408


async def test_headers_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_UNENDED_HEAD_BYTES", 1000)
    async with calling() as caller:
        caller.writer.write(LINE + b"x-a: " + b"a" * 2000)
        status, error = await caller.error()
    assert (status, error["code"]) == (431, "headers_too_large")


async def test_what_is_left_of_a_body_that_was_refused_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LINGER_S", SOON_S)
    async with calling(max_body_bytes=1000) as caller:
        caller.writer.write(LINE + b"Content-Length: 2000\r\n\r\nsome of it")
        assert (await caller.told())[0] == 413


async def test_what_is_no_http_is_refused_in_the_words_of_the_api() -> None:
    async with calling() as caller:
        caller.writer.write(b"GARBAGE\r\n\r\n")
        status, error = await caller.error()
    assert (status, error["code"]) == (400, "invalid_request")
