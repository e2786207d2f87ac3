"""A client that takes its time, or never ends: told so in the API's words, and its connection is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.http import protocol
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

BODY = json.dumps({"model": "tiny", "prompt": "hello", "stream": True}).encode()
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
WHOLE = LINE + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
NEVER_S, SOON_S = 1000.0, 0.1


class Caller:
    """A client that sends what it is told to, and reads to the end of its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def told(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body) of the last thing that was said before the connection ended."""
        async with asyncio.timeout(60):
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


async def test_a_timely_body_may_come_in_pieces() -> None:
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


@pytest.mark.parametrize("sent", [b"", LINE + b"x-a: ", WHOLE + LINE])
async def test_a_head_that_has_no_end_ends_its_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", SOON_S)
    async with calling() as caller:
        caller.writer.write(sent)
        told = await asyncio.wait_for(caller.reader.read(), 60)
    assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") == (WHOLE in sent)


async def test_a_client_leaving_a_pipeline_leaves_all_its_requests() -> None:
    generate = Scripted(lambda job: [asyncio.Event()])
    async with calling(generate=generate, keep_alive_s=SOON_S) as caller:
        caller.writer.write(WHOLE + WHOLE)
        assert (await caller.reader.readline()).endswith(b" 200 OK\r\n")
        caller.writer.transport.abort()
        await asyncio.wait_for(generate.idle.wait(), 60)  # its comments reach nobody
    assert len(generate.jobs) == 1, "the other one does not begin"


async def test_a_head_is_not_waited_for_while_an_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", SOON_S)
    go_on, waited = asyncio.Event(), asyncio.Event()
    late = protocol.HttpProtocol._late

    def noted(self: protocol.HttpProtocol) -> None:
        waited.set()
        late(self)

    monkeypatch.setattr(protocol.HttpProtocol, "_late", noted)
    generate = Scripted(lambda job: [go_on, *saying("hi")(job)])
    async with calling(generate=generate) as caller:
        caller.writer.write(WHOLE + LINE)  # the next request's head begins, and goes no further
        await waited.wait()
        go_on.set()
        await caller.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_headers_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_UNENDED_HEAD_BYTES", 1000)
    async with calling() as caller:
        caller.writer.write(LINE + b"x-a: " + b"a" * 2000)
        status, error = await caller.error()
    assert (status, error["code"]) == (431, "headers_too_large")


PIECES = b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: here\r\n"

NOT_REQUESTS = {
    "no words": b"GARBAGE\r\n\r\n",
    "words of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500,
    "no size of a chunk": LINE + PIECES + b"zz\r\nabc\r\n0\r\n\r\n",
    "a negative chunk": LINE + PIECES + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk beyond all sizes": LINE + PIECES + b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n",
    "a longer chunk": LINE + PIECES + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk with ends of lines of its own": LINE + PIECES + b"3\nabc\n0\n\n",
    "an unknown coding": LINE + b"Transfer-Encoding: xchunked\r\n\r\n",
    "length and chunks": LINE + b"Content-Length: 3\r\n" + PIECES + b"0\r\n\r\n",
    "chunks and length": LINE + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    "two lengths": LINE + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "a negative length": LINE + b"Content-Length: -3\r\n\r\nabc",
    "a length of 5,000 digits": LINE + b"Content-Length: " + b"1" * 5000 + b"\r\n\r\n",
    "a folded header": GET + b"x-a: b\r\n c\r\n\r\n",
    "lines that end with LF alone": b"GET /health HTTP/1.1\nHost: here\n\n",
    "a space before the colon": GET + b"x-a : b\r\n\r\n",
    "a NUL in a header": GET + b"x-a: b\x00c\r\n\r\n",
    "a NUL in a path": b"GET /he\x00alth HTTP/1.1\r\nHost: here\r\n\r\n",
    "a proxy's method": b"CONNECT there:80 HTTP/1.1\r\nHost: there\r\n\r\n",
    "a URL without a path": b"GET http://here HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("kind", NOT_REQUESTS)
async def test_malformed_requests_are_answered_and_closed(kind: str) -> None:
    generate = Scripted(saying("hi"))
    async with calling(generate) as caller:
        caller.writer.write(NOT_REQUESTS[kind])
        await caller.writer.drain()
        status, error = await caller.error()
    assert (status, error["code"]) == (400, "invalid_request")
    assert not generate.jobs


async def test_a_body_may_come_in_very_many_chunks() -> None:
    body = BODY[:-1] + b" " * 100_000 + b"}"
    generate = Scripted(saying("hi"))
    async with calling(generate) as caller:
        pieces = b"".join(b"0001;a\r\n%c\r\n" % byte for byte in body)
        caller.writer.write(LINE + b"Connection: close\r\n" + PIECES + pieces + b"0\r\n\r\n")
        status, _, _ = await caller.told()
    assert (status, len(generate.jobs)) == (200, 1)


async def test_trailers_are_no_headers() -> None:
    async with calling() as caller:
        chunk = b"%x\r\n%b\r\n0\r\nx-baton-request-id: trailing\r\n\r\n" % (len(BODY), BODY)
        caller.writer.write(LINE + b"Connection: close\r\n" + PIECES + chunk)
        status, headers, _ = await caller.told()
    assert status == 200
    assert headers[b"x-baton-request-id"] != b"trailing"


@pytest.mark.parametrize(
    "asked",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",  # Java's client
        b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n",
    ],
)
async def test_an_upgrade_is_answered_in_this_protocol(asked: bytes) -> None:
    generate = Scripted(saying("hi"))
    async with calling(generate) as caller:
        for _ in range(2):
            caller.writer.write(WHOLE.replace(b"Host: here\r\n", b"Host: here\r\n" + asked))
            assert (await caller.reader.readline()).endswith(b" 200 OK\r\n")
            await caller.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(generate.jobs) == 2


async def test_a_length_may_have_thousands_of_leading_zeros() -> None:
    async with calling() as caller:
        length = b"Content-Length: " + b"0" * 5000 + b"%d\r\nConnection: close\r\n\r\n" % len(BODY)
        caller.writer.write(LINE + length + BODY)
        assert (await caller.told())[0] == 200
