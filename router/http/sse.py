"""Answers while the client is listening: server-sent events, and work that ends when the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from math import inf
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protos.errors import BatonError, Cancelled
from router.http.errors import error_body, error_response, internal_error
from router.http.pace import Pace
from router.http.response_writer import Outlet, outlet_of
from router.metrics import Track
from router.streaming.shortcut import Shortcut
from router.text.text_stream import Say

log = logging.getLogger("baton.http")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": the answer is on its way\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind would collect the events otherwise
]

_STALL_LOOKS = 4  # so often in `stall_s` a stream's connection is looked at

_T = TypeVar("_T")

HOLE = "\0 text \0"


class Way:
    """One response's way past ASGI's layers. `sent_s`: when something was sent last, by the loop's clock."""

    def __init__(self) -> None:
        self.outlet: Outlet | None = None
        self.shortcut: Shortcut | None = None
        self.sent_s = 0.0

    def put(self, chunk: bytes, now: float) -> bool:
        """Sends events if the way is clear; False: they were not sent. No events at all only ask."""
        if self.outlet is None or not self.outlet.write(chunk):
            return False
        if chunk:
            self.sent_s = now
        return True


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


class Voice:
    """Says the text of an answer's choices in events that are alike but for it: what is before and behind the `HOLE` in
    a choice's content is written once. Each text is an event of its own, unless the gateway is late (`Pace`). The exit
    of a choice that is alone."""

    def __init__(self, content: Callable[[int], Any], way: Way, pace: Pace) -> None:
        self._content = content
        self._way = way
        self._put = way.put
        self._pace = pace
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._held: dict[int, str] = {}
        self._said_s = 0.0

    def speaker(self, num_choices: int) -> Say:
        """What waits is written soon: it is taken only while the way is clear."""
        if num_choices == 1 and self._way.shortcut is None:
            self._way.shortcut = Shortcut(self._pace, self)
        return Say(self.say, self._note, self._way.shortcut)

    def end(self) -> None:
        """Whatever waits is forgotten."""
        if self._way.shortcut is not None:
            self._way.shortcut.end()
            self._way.shortcut = None  # it knows us: no circle is left for the collector
        self._held.clear()

    def say(self, index: int, text: str, num_tokens: int, now: float) -> bool:
        if not text:
            return True
        gap_s = self._pace.gap_s
        if not (gap_s or self._held):
            return self._put(self._event(index, text), now)
        if not self._put(b"", now):
            return False
        if not self._held:
            self._pace.when_due(self._flush)
        self._held[index] = self._held.get(index, "") + text
        if now >= self._said_s + gap_s:
            self._flush(now)
        return True

    def held(self) -> bytes:
        """The events that wait, which now do so no longer: they go before any other."""
        events = b"".join([self._event(index, text) for index, text in self._held.items()])
        self._held.clear()
        return events

    def _flush(self, now: float) -> bool:
        """Whether there is anything left to be flushed later."""
        if self._held and now >= self._said_s + self._pace.gap_s:
            events = [self._event(index, text) for index, text in self._held.items()]
            if self._put(b"".join(events), now):
                self._said_s = now
                self._held.clear()
        return bool(self._held)

    def _note(self, index: int, text: str, num_tokens: int, now: float) -> None:
        self._way.sent_s = now

    # -- an exit -------------------------------------------------------------------------------------------------------

    def frame(self) -> tuple[bytes, bytes]:
        before, behind = self._frame(0)
        return before + b'"', b'"' + behind

    def descriptor(self) -> int | None:
        outlet = self._way.outlet
        return outlet.descriptor() if outlet is not None else None

    def give_held(self) -> str | None:
        outlet = self._way.outlet
        return self._held.pop(0, "") if outlet is not None and outlet.is_empty() else None

    def take_back(self, held: bytes, rest: bytes) -> None:
        if rest and self._way.outlet is not None:
            self._way.outlet.finish(rest)
        if held:
            self._held[0] = orjson.loads(b'"%b"' % held)
            self._pace.when_due(self._flush)

    # ------------------------------------------------------------------------------------------------------------------

    def _event(self, index: int, text: str) -> bytes:
        before, behind = self._frame(index)
        return before + orjson.dumps(text) + behind

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        if index not in self._frames:
            before, hole, behind = event(self._content(index)).partition(orjson.dumps(HOLE))
            assert hole, "the content has a hole"
            self._frames[index] = (before, behind)
        return self._frames[index]


async def while_connected(scope: Scope, receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled, and has cleaned up, when the client goes away (raises Cancelled).

    The request's body must have been read: whatever is received now means the end.
    """
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
    """A server of our own tells of a connection that is lost; any other is asked by a task."""
    if (outlet := outlet_of(scope)) is not None:
        with outlet.watched(leave):
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


class _StallWatch:
    """Ends a connection whose client takes nothing for `stall_s`, however much of the answer the kernel still takes."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._timer: asyncio.TimerHandle | None = None
        self._progress: tuple[int | None, float] = (None, 0.0)  # the last one, and since when
        self.has_stalled = False

    @contextmanager
    def __call__(self, outlet: Outlet | None) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if outlet is not None and self._stall_s < inf:
            self._timer = loop.call_later(self._stall_s / _STALL_LOOKS, self._look, loop, outlet)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # it knows us: no circle is left for the collector

    def error(self) -> Cancelled:
        return Cancelled(f"the client has taken nothing for {self._stall_s:g} s")

    def _look(self, loop: asyncio.AbstractEventLoop, outlet: Outlet) -> None:
        (before, since_s), progress, now = self._progress, outlet.progress(), loop.time()
        if progress is None or progress != before:
            self._progress = (progress, now)
        elif now >= since_s + self._stall_s:
            self.has_stalled = True
            outlet.abort()
            return
        self._timer = loop.call_later(self._stall_s / _STALL_LOOKS, self._look, loop, outlet)


class EventStream(Response):
    """Sends events as they come, the status and headers with the first of them.

    An error before the first event is an ordinary error response with its status; after it, an event and the end,
    without [DONE]. The events are closed, and the track finished, however it ends.

    While there is no event for `keep_alive_s`, a comment is sent, which clients pass over: proxies would take the
    connection for dead, and a client for hung, while a long prompt is read. It begins the response, if nothing has.
    A client that takes nothing for `stall_s` is taken for gone.
    """

    def __init__(
        self,
        events: Callable[[Way], AsyncGenerator[bytes, None]],
        track: Track,
        *,
        keep_alive_s: float = inf,
        stall_s: float = inf,
    ) -> None:
        """While the events' consumer waits for the next, they may go another way without being yielded."""
        super().__init__(media_type="text/event-stream")
        self._way = Way()
        self._events = events(self._way)
        self._track = track
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._started = False
        self._stall_watch = _StallWatch(stall_s)
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = None
        self._way.outlet = outlet_of(scope)
        try:
            with self._kept_alive(send), self._stall_watch(self._way.outlet):
                await while_connected(scope, receive, self._send_all(send))
        except Cancelled as left:
            has_stalled = self._stall_watch.has_stalled
            error = self._stall_watch.error() if has_stalled else left
            if has_stalled and self._way.outlet is not None:
                self._way.outlet.abort()
                await asyncio.sleep(0)  # the server learns of it, and expects no end of the response
        except BatonError as failed:
            error = failed
            await self._fail(failed, scope, receive, send)
        except Exception as bug:  # the client is owed an end, whatever we did wrong
            error = bug
            name = scope.get("state", {}).get("request_id")
            log.exception("request %s failed for a reason of our own", name, extra={"request": name})
            await self._fail(internal_error(), scope, receive, send)
        except BaseException as ended:
            error = ended
            raise
        finally:
            self._track.finish(error)

    async def _send_all(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events) as events:
            async for chunk in events:
                if self._started and self._way.put(chunk, clock()):
                    continue
                await self._begin(send)
                self._way.sent_s = clock()
                await self._send(send, chunk)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, chunk: bytes) -> None:
        """Waits for a client that reads too slowly. Raises Cancelled when that lasts `stall_s` under a server without
        outlets, of whose connections nothing else is known: a client's sequences hold seats that others wait for."""
        message = {"type": "http.response.body", "body": chunk, "more_body": True}
        if self._stall_s == inf or self._way.outlet is not None:
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
        """Most answers are shorter than `keep_alive_s`: until then there is a timer, and no task."""
        loop = asyncio.get_running_loop()
        self._way.sent_s = loop.time()
        if self._keep_alive_s < inf:
            self._timer = loop.call_at(self._way.sent_s + self._keep_alive_s, self._look, loop, send)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # it knows us: no circle is left for the collector
            if self._commenting is not None:
                self._commenting.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        way, now = self._way, loop.time()
        if way.shortcut is not None:  # which says only now what it has sent, and must not write beside the comment
            way.shortcut.interrupt()
        due_s = way.sent_s + self._keep_alive_s
        if now >= due_s:
            due_s = now + self._keep_alive_s
            if self._commenting is None or self._commenting.done():
                self._commenting = loop.create_task(self._comment(loop, send))
        self._timer = loop.call_at(due_s, self._look, loop, send)

    async def _comment(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        await self._begin(send)
        self._way.sent_s = loop.time()
        await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def _begin(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            await send({"type": "http.response.body", "body": event(error_body(error))})
        else:
            await error_response(error)(scope, receive, send)
