"""Answers while the client is listening: server-sent events, and work that ends when the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from math import inf
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from protos.errors import BatonError, Cancelled
from router.http.api import OPENAI, api_of, error_response, internal_error
from router.http.protocol import ResponseChannel, channel_of
from router.request_metrics import Track
from router.streaming.token_sink import TokenSink

log = logging.getLogger("baton.http")

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind would collect the events otherwise
]

_STALL_LOOKS = 4  # so often in `stall_s` a stream's connection is looked at, at least
_UNREAD_S = 1.0  # a client that takes nothing for so long reads nothing

_T = TypeVar("_T")

TEXT_PLACEHOLDER = "\0 text \0"


class SseWriter:
    """Writes events that differ only in a choice's text: the constant parts are encoded once. Its `sinks` write them to
    the channel, and hold texts back while the gateway is late (`Pace`). `content` and `reasoning` make the event of a
    text."""

    def __init__(
        self,
        content: Callable[[int, str], Any],
        reasoning: Callable[[int, str], Any],
        channel: ResponseChannel | None,
        frame: Callable[[Any], bytes],
    ) -> None:
        self._framed = _Frames(content, reasoning, frame)
        self._channel = channel
        self.sinks: Sequence[TokenSink] = ()

    def events(self, index: int) -> ChoiceEvents | None:
        """The sink of one choice; None if the server has no channels."""
        return ChoiceEvents(self._framed, index, self._channel) if self._channel is not None else None

    def held(self) -> bytes:
        """The events of texts that sinks hold back. They are sent first."""
        return b"".join([text.join(frame) for sink in self.sinks for frame, text in sink.held()])

    async def behind_held(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yields the chunks, each after the texts that sinks held back; an error ends with those texts."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield self.held() + chunk
        except Exception:
            if held := self.held():
                yield held
            raise


class _Frames:
    """The parts of a choice's event around its text."""

    def __init__(
        self, content: Callable[[int, str], Any], reasoning: Callable[[int, str], Any], frame: Callable[[Any], bytes]
    ) -> None:
        self._contents = (content, reasoning)
        self._frame = frame

    def __call__(self, index: int, is_reasoning: bool) -> list[bytes]:
        content = self._contents[is_reasoning](index, TEXT_PLACEHOLDER)
        parts = self._frame(content).split(orjson.dumps(TEXT_PLACEHOLDER)[1:-1])
        assert len(parts) in (2, 3), "the content has a place for text"
        return parts


class ChoiceEvents:
    """Where the sink of one choice writes to."""

    def __init__(self, frames: Callable[[int, bool], list[bytes]], index: int, channel: ResponseChannel) -> None:
        self._frames = frames
        self._index = index
        self._channel = channel
        self.write, self.state = channel.write_alone, channel.state

    def make_clear(self) -> bool:
        self._channel.flush()
        return self._channel.is_clear

    def frame(self, *, is_reasoning: bool) -> list[bytes]:
        return self._frames(self._index, is_reasoning)


async def while_connected(scope: Scope, receive: Receive, work: Awaitable[_T]) -> _T:
    """Returns the result of `work`, which a disconnect cancels: then Cancelled is raised. The body must have been read:
    any message received now is a disconnect."""
    task = asyncio.current_task()
    assert task is not None
    has_left = is_over = False

    def leave() -> None:
        nonlocal has_left
        if not (has_left or is_over):
            has_left = True
            task.cancel()

    try:
        with _watching(scope, receive, leave):
            return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise Cancelled("the client went away") from None
        raise
    finally:
        is_over = True


@contextmanager
def _watching(scope: Scope, receive: Receive, leave: Callable[[], None]) -> Iterator[None]:
    """Baton's server reports a lost connection by callback; under another server a task waits for the message."""
    if (channel := channel_of(scope)) is not None:
        with channel.watched(leave):
            yield
        return
    gone = asyncio.create_task(_gone(receive))
    gone.add_done_callback(lambda _: leave())
    try:
        yield
    finally:
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StallWatch:
    """Sends the track's workers whether its client reads, and calls `abort` when it has taken nothing for `stall_s`."""

    def __init__(self, stall_s: float, track: Track) -> None:
        self._stall_s = stall_s
        self._period_s = min(stall_s / _STALL_LOOKS, _UNREAD_S)
        self._track = track
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int | None, float] = (None, 0.0)  # the last one, and since when
        self._is_unread = False
        self.has_stalled = False

    @contextmanager
    def __call__(self, progress: Callable[[], int | None], abort: Callable[[], None]) -> Iterator[None]:
        """`progress` returns a number that changes when the client takes something; None once it has taken all."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._period_s, self._look, loop, progress, abort)
        try:
            yield
        finally:
            self._timer.cancel()
            self._timer = None  # it knows us: no circle is left for the collector

    def error(self) -> Cancelled:
        return Cancelled(f"the client has read nothing for {self._stall_s:g} s")

    def _look(
        self, loop: asyncio.AbstractEventLoop, progress: Callable[[], int | None], abort: Callable[[], None]
    ) -> None:
        (before, since_s), latest, now = self._progress, progress(), loop.time()
        if latest is None or latest != before:
            self._progress = (latest, now)
            if self._is_unread:
                self._is_unread = False
                self._track.set_unread(False)
        elif now >= since_s + self._stall_s:
            self.has_stalled = True
            abort()
            return
        else:  # sent at each look: another worker may have the request by now
            self._is_unread = True
            self._track.set_unread(True)
        self._timer = loop.call_later(self._period_s, self._look, loop, progress, abort)


class EventStream:
    """An answer as an ASGI application. Status and headers leave with the first event: an earlier error is an ordinary
    response, a later one the API's error event. A comment keeps a silent connection alive every `keep_alive_s`; a
    client that reads nothing for `stall_s` is gone. The track is always finished."""

    def __init__(
        self,
        events: Callable[[ResponseChannel | None], AsyncGenerator[bytes, None]],
        track: Track,
        *,
        keep_alive_s: float = inf,
        stall_s: float = inf,
        headers: Sequence[tuple[bytes, bytes]] = (),
        failure: Callable[[BatonError], bytes] | None = None,
    ) -> None:
        """`failure` makes the last event of a stream that fails, in place of the API's error event."""
        self._events = events
        self._channel: ResponseChannel | None = None
        self._sent_s = 0.0  # through ASGI
        self._track = track
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._headers = headers
        self._failure = failure
        self._api = OPENAI
        self._started = False
        self._stall_watch = StallWatch(stall_s, track)
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = None
        self._channel, self._api = channel_of(scope), api_of(scope)
        try:
            with self._kept_alive(send), self._watched():
                await while_connected(scope, receive, self._send_all(send))
        except Cancelled as left:
            has_stalled = self._stall_watch.has_stalled
            error = self._stall_watch.error() if has_stalled else left
            if has_stalled and self._channel is not None:
                self._channel.abort()
                await asyncio.sleep(0)  # the server learns of it, and expects no end of the response
        except BatonError as failed:
            error = failed
            await self._fail(failed, scope, receive, send)
        except Exception as bug:  # the client needs an end of the stream, even after an internal error
            error = bug
            name = scope.get("state", {}).get("request_id")
            log.exception("request %s failed: internal error", name, extra={"request": name})
            await self._fail(internal_error(), scope, receive, send)
        except BaseException as ended:
            error = ended
            raise
        finally:
            self._track.finish(error)

    def _watched(self) -> AbstractContextManager[None]:
        channel = self._channel
        return self._stall_watch(channel.progress, channel.abort) if channel is not None else nullcontext()

    async def _send_all(self, send: Send) -> None:
        clock, channel = asyncio.get_running_loop().time, self._channel
        events = self._events(channel)
        try:
            async for chunk in events:
                if self._started and channel is not None and channel.write(chunk, clock()):
                    continue
                await self._begin(send)
                self._sent_s = clock()
                await self._send(send, chunk)
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, chunk: bytes) -> None:
        """Raises Cancelled after `stall_s` without a channel: the client's sequences hold seats that others wait
        for."""
        message = {"type": "http.response.body", "body": chunk, "more_body": True}
        if self._stall_s == inf or self._channel is not None:
            await send(message)
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            self._stall_watch.has_stalled = True
            raise self._stall_watch.error() from None

    @contextmanager
    def _kept_alive(self, send: Send) -> Iterator[None]:
        """Sends comments after `keep_alive_s`. Shorter answers need a timer only, no task."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        if self._keep_alive_s < inf:
            self._timer = loop.call_at(self._sent_s + self._keep_alive_s, self._look, loop, send)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # it knows us: no circle is left for the collector
            if self._commenting is not None:
                self._commenting.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        now, channel = loop.time(), self._channel
        sent_s = self._sent_s if channel is None else max(self._sent_s, channel.state.sent_s)
        due_s = sent_s + self._keep_alive_s
        if now >= due_s:
            due_s = now + self._keep_alive_s
            if self._commenting is None or self._commenting.done():
                self._commenting = loop.create_task(self._comment(loop, send))
        self._timer = loop.call_at(due_s, self._look, loop, send)

    async def _comment(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        await self._begin(send)
        self._sent_s = loop.time()
        await send({"type": "http.response.body", "body": self._api.keep_alive, "more_body": True})

    async def _begin(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._api.stream_type), *_HEADERS, *self._headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            make = self._failure or self._api.error_event
            await send({"type": "http.response.body", "body": make(error)})
        else:
            await error_response(error, self._api)(scope, receive, send)
