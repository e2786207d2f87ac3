"""POST /v1/messages and /v1/messages/count_tokens.

message_start (usage of the prompt) ─▶ content_block_start ─▶ ..._delta ─▶ content_block_stop ─▶ ...
                                       message_delta (stop reason, usage) ─▶ message_stop
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.hints import listed
from protos.values import FinishReason
from router.anthropic.blocks import conversation_of, is_prefilled, messages_tooling
from router.anthropic.schema import MessagesBody, PromptBody
from router.conversation.parts import Ignored, wrong
from router.conversation.sending import send
from router.conversation.thinking import Thinking, knows_effort, thinking_options
from router.conversation.tooling import AnswerReader, ReasoningDelta, Tooling, call_input
from router.conversation.turn import ConversationTurn
from router.gateway import Gateway
from router.http.body import read_body, with_bound
from router.http.errors import json_response
from router.http.framing import named_event
from router.http.middleware import track_of
from router.http.response_channel import ResponseChannel
from router.http.sse import TEXT_PLACEHOLDER, EventStream, SseWriter
from router.metrics import Track
from router.text.sampling_request import SamplingRequest, TextRequest
from router.text.text_stream import TextDelta, Usage, UsageCounter, collect
from router.tools.calls import CallDelta
from router.tools.formats import new_call_id

_PING = {"type": "ping"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")


async def messages(gateway: Gateway, request: Request) -> Response | EventStream:
    track = track_of(request)
    body = await read_body(request, MessagesBody, gateway.widest)
    gateway = gateway.serving(body.model, track)
    ignored = Ignored()
    turn = _turn(gateway, body, with_bound(body.sampling(), request), ignored)
    ask = await turn.request(gateway, request, gateway.new_id("msg_"), cut=True)
    answer = _MessageAnswer(gateway, ask, turn.tooling, max_tokens=body.max_tokens)
    return await send(gateway, request, track, answer, stream=bool(body.stream), ignored=ignored)


async def count_tokens(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, PromptBody, gateway.widest)
    gateway = gateway.serving(body.model)
    ignored = Ignored()
    ids = await _turn(gateway, body, SamplingRequest(), ignored).prompt(gateway)
    return json_response({"input_tokens": len(ids)}, headers=ignored.headers())


def _turn(gateway: Gateway, body: PromptBody, sampling: SamplingRequest, ignored: Ignored) -> ConversationTurn:
    conversation = conversation_of(body, ignored)
    tooling = messages_tooling(body, gateway, ignored)
    shows_reasoning, options = _thinking(gateway, body, ignored)
    if body.output_config is not None:
        for name in body.output_config.model_extra or {}:
            ignored.add(f"output_config.{name}")
    for name in body.model_extra or {}:
        ignored.add(name)
    return ConversationTurn(
        messages=conversation,
        sampling=sampling,
        tooling=tooling,
        continue_final_message=is_prefilled(conversation),
        options=options,
        shows_reasoning=shows_reasoning,
    )


def _thinking(gateway: Gateway, body: PromptBody, ignored: Ignored) -> tuple[bool, Mapping[str, Any] | None]:
    """Whether reasoning is shown, and variables of the chat template. In this API a model reasons on request only: the
    reasoning of one that cannot be kept from it is left out."""
    given = body.thinking or {}
    kind, effort = given.get("type", "disabled"), body.output_config.effort if body.output_config is not None else None
    if kind not in _THINKING:
        raise wrong("thinking.type", kind, listed(_THINKING))
    is_on = kind != "disabled"
    if is_on and gateway.reasoning is None:
        ignored.add("thinking")
    elif is_on:
        for name in given.keys() - {"type", "display"}:
            ignored.add(f"thinking.{name}")
    if effort is not None and (not is_on or not knows_effort(gateway)):
        ignored.add("output_config.effort")
        effort = None
    options = thinking_options(gateway, Thinking(is_on=is_on, effort=effort))
    return is_on and given.get("display") != "omitted", options


class _MessageAnswer:
    """One message of the model, sent whole or as events. `max_tokens` are those that the client asked for."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling, *, max_tokens: int) -> None:
        self._gateway = gateway
        self._ask = ask
        self._reader = AnswerReader(tooling)
        self._form = tooling.form
        self._max_tokens = max_tokens
        self._num_blocks = 0
        self._open = ""  # the type of the block that is not complete

    async def whole(self, track: Track) -> dict[str, Any]:
        pieces = self._gateway.answer(self._ask, track, is_plain=self._form is None)
        [answer], usage = await collect(pieces, self._ask)
        content: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for part in self._reader.read(answer):
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif isinstance(part, ReasoningDelta):
                content.append({"type": "thinking", "thinking": part.text, "signature": self._signature})
            elif part.name:
                content.append(self._block(part))
                arguments.append([part.arguments])
            else:
                arguments[-1].append(part.arguments)
        calls = (block for block in content if block["type"] == "tool_use")
        for block, written in zip(calls, arguments, strict=True):
            block["input"] = call_input("".join(written))
        return self._message(content, usage) | self._ending(answer, usage)

    def events(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        def text(_: int) -> dict[str, Any]:
            return _delta(self._num_blocks - 1, {"type": "text_delta", "text": TEXT_PLACEHOLDER})

        def thinking(_: int) -> dict[str, Any]:
            return _delta(self._num_blocks - 1, {"type": "thinking_delta", "thinking": TEXT_PLACEHOLDER})

        writer = SseWriter(text, channel, named_event, reasoning=thinking)
        return writer.behind_held(self._stream(track, writer))

    async def _stream(self, track: Track, writer: SseWriter) -> AsyncGenerator[bytes, None]:
        tally = UsageCounter(self._ask)
        answer = self._gateway.answer(self._ask, track, tally, is_plain=self._form is None, writer=writer)
        last, has_begun = TextDelta(index=0), False
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                if not piece.num_tokens and piece.finish_reason is None:
                    continue
                events = []
                if not has_begun:
                    has_begun = True
                    events = self._beginning(piece, tally.usage())
                events += self._events(piece)
                last = piece
                if events:
                    yield b"".join(map(named_event, events))
        usage = tally.usage()
        ending = self._ending(last, usage)
        counts = ending.pop("usage")
        yield named_event({"type": "message_delta", "delta": ending, "usage": counts}) + named_event(
            {"type": "message_stop"}
        )

    def _beginning(self, piece: TextDelta, usage: Usage) -> list[dict[str, Any]]:
        """The prompt's usage is known with the first token. The tokens of an answer without tools and reasoning are
        written by its sink from here on, so its block of text begins now."""
        events: list[dict[str, Any]] = [{"type": "message_start", "message": self._message([], usage)}, _PING]
        if self._form is None and self._ask.reasoning is None and (piece.text or piece.finish_reason is None):
            events += self._begun({"type": "text", "text": ""})
        return events

    def _events(self, piece: TextDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in self._reader.read(piece):
            if isinstance(part, str):
                if self._open != "text":
                    events += self._ended() + self._begun({"type": "text", "text": ""})
                events.append(_delta(self._num_blocks - 1, {"type": "text_delta", "text": part}))
                continue
            if isinstance(part, ReasoningDelta):
                if self._open != "thinking":
                    events += self._ended() + self._begun({"type": "thinking", "thinking": "", "signature": ""})
                events.append(_delta(self._num_blocks - 1, {"type": "thinking_delta", "thinking": part.text}))
                continue
            if part.name:
                events += self._ended() + self._begun(self._block(part))
            if part.arguments:
                written = {"type": "input_json_delta", "partial_json": part.arguments}
                events.append(_delta(self._num_blocks - 1, written))
        return events + self._ended() if piece.finish_reason is not None else events

    def _block(self, call: CallDelta) -> dict[str, Any]:
        assert self._form is not None
        return {"type": "tool_use", "id": new_call_id(self._form, prefix="toolu_"), "name": call.name, "input": {}}

    def _begun(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._open = block["type"]
        self._num_blocks += 1
        return [{"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _ended(self) -> list[dict[str, Any]]:
        was_open, self._open, index = self._open, "", self._num_blocks - 1
        if not was_open:
            return []
        signature = {"type": "signature_delta", "signature": self._signature}
        signed = [_delta(index, signature)] if was_open == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": index}]

    @property
    def _signature(self) -> str:
        """Clients drop reasoning without one before they send it back; it is not checked here."""
        return f"baton-{self._ask.request_id}"

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._ask.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._gateway.card.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(usage),
        }

    def _ending(self, last: TextDelta, usage: Usage) -> dict[str, Any]:
        if last.finish_reason is FinishReason.LENGTH:
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif last.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._reader.has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": last.stop_string, "usage": usage_of(usage)}


def usage_of(usage: Usage) -> dict[str, Any]:
    """The prompt has as many tokens as the three of its counts together. Every prompt is cached, and writing to the
    cache costs nothing: `cache_creation_input_tokens` is 0."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
