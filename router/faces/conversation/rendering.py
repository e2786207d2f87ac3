"""An answer on its way to the client: an API's renderer writes its events, and a whole answer is what they add up to.

pieces ─▶ parts ─▶ Renderer: start, text, reasoning, call, stop, end ─▶ EventStream, or one JSON value
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError
from protos.values import FinishReason
from router.faces.conversation.parts import Ignored
from router.faces.conversation.tooling import AnswerReader, ReasoningDelta, Tooling
from router.gateway import Gateway
from router.http.api import json_response
from router.http.middleware import track_of
from router.http.protocol import ResponseChannel
from router.http.sse import EventStream, SseWriter, while_connected
from router.request_metrics import Track
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, Usage, UsageCounter, collect
from router.text.tools.calls import CallDelta

Events = list[Any]


class Renderer(ABC):
    """Writes one answer in the form of an API. `is_plain`: only the text of its tokens is sent."""

    failure: Callable[[BatonError], bytes] | None = None
    has_sinks: ClassVar[bool] = True
    """Events differ only in their texts, so that a `TokenSink` can write them."""

    def __init__(self, gateway: Gateway, ask: TextRequest, *, is_plain: bool) -> None:
        self.gateway = gateway
        self.ask = ask
        self.is_plain = is_plain

    @abstractmethod
    def read(self, piece: TextDelta, usage: Callable[[], Usage]) -> Events:
        """The events that a piece adds; `usage` is that so far."""

    @abstractmethod
    def frame(self, one: Any) -> bytes:
        """An event as it is sent."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The last events of a stream that has not failed."""

    @abstractmethod
    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> dict[str, Any]:
        """The answer of these choices, each in one piece."""

    def placed(self, index: int, text: str) -> Any:
        """The event with a text of a choice, once the choice has begun."""
        raise NotImplementedError

    def thought(self, index: int, text: str) -> Any:
        """The event with reasoning of a choice, once that has begun."""
        return self.placed(index, text)

    async def collected(self, track: Track) -> dict[str, Any]:
        choices, usage = await collect(self.gateway.answer(self.ask, track, is_plain=self.is_plain), self.ask)
        return self.whole(choices, usage)

    def events(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        if not self.has_sinks:
            return self._written(track, None)
        writer = SseWriter(self.placed, self.thought, channel, self.frame)
        return writer.behind_held(self._written(track, writer))

    async def _written(self, track: Track, writer: SseWriter | None) -> AsyncGenerator[bytes, None]:
        tally, is_plain = UsageCounter(self.ask), self.is_plain and writer is not None
        answer = self.gateway.answer(self.ask, track, tally, is_plain=is_plain, writer=writer)
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                if events := self.read(piece, tally.usage):
                    yield b"".join(map(self.frame, events))
        yield self.end(tally.usage())


class TurnRenderer(Renderer):
    """Writes one turn of the model. `last` is the last piece."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling) -> None:
        super().__init__(gateway, ask, is_plain=tooling.form is None)
        self.form = tooling.form
        self.last = TextDelta(index=0)
        self._reader = AnswerReader(tooling)
        self._has_begun = False

    @property
    def has_called(self) -> bool:
        return self._reader.has_called

    def read(self, piece: TextDelta, usage: Callable[[], Usage]) -> Events:
        events: Events = []
        if not self._has_begun:
            self._has_begun = True
            events += self.start(piece, usage())
        for part in self._reader.read(piece):
            if isinstance(part, str):
                events += self.text(part)
            else:
                events += self.reasoning(part.text) if isinstance(part, ReasoningDelta) else self.call(part)
        if piece.finish_reason is not None:
            events += self.stop(piece.finish_reason)
        self.last = piece
        return events

    def start(self, piece: TextDelta, usage: Usage) -> Events:
        """The first events; the `piece` is read after them."""
        return []

    @abstractmethod
    def text(self, text: str) -> Events: ...

    @abstractmethod
    def reasoning(self, text: str) -> Events: ...

    @abstractmethod
    def call(self, delta: CallDelta) -> Events:
        """The beginning of a call, with its name, or more of its arguments."""

    @abstractmethod
    def stop(self, reason: FinishReason) -> Events:
        """The end of what is open."""


async def send(
    renderer: Renderer, request: Request, *, stream: bool | None, ignored: Ignored | None = None
) -> Response | EventStream:
    """Names in `ignored` go into a header. Raises Cancelled when the client goes away."""
    track = track_of(request)
    if stream:
        return EventStream(
            partial(renderer.events, track),
            track,
            keep_alive_s=renderer.gateway.http.keep_alive_s,
            stall_s=renderer.gateway.http.stall_s,
            headers=ignored.raw_headers() if ignored is not None else (),
            failure=renderer.failure,
        )
    whole = await while_connected(request.scope, request.receive, renderer.collected(track))
    return json_response(whole, headers=ignored.headers() if ignored is not None else None)
