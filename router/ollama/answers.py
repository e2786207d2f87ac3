"""POST /api/chat and /api/generate: lines of JSON while the answer comes, the last with its counts and times."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.event_loop import loop_time
from protos.values import FinishReason
from router.conversation.parts import Ignored
from router.conversation.sending import send
from router.conversation.thinking import Thinking, knows_effort, thinking_options
from router.conversation.tooling import AnswerPart, AnswerReader, ReasoningDelta, Tooling, call_input
from router.conversation.turn import ConversationTurn
from router.gateway import Gateway
from router.http.body import read_body, with_bound
from router.http.errors import json_response
from router.http.framing import json_line
from router.http.middleware import tenant_of, track_of
from router.http.response_channel import ResponseChannel
from router.http.sse import TEXT_PLACEHOLDER, EventStream, SseWriter
from router.metrics import Track
from router.ollama.conversations import conversation_of, ollama_tooling, prompt_of
from router.ollama.models import gateway_of
from router.ollama.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router.text.sampling_request import TextRequest, make_text_request
from router.text.text_stream import TextDelta, Usage, UsageCounter
from router.tools.calls import CallDelta

Line = dict[str, Any]
MakeFields = Callable[[str, list[Line], str], Line]
"""The fields of an answer's line for a text, calls and reasoning."""


async def chat(gateway: Gateway, request: Request) -> Response | EventStream:
    track = track_of(request)
    body = await read_body(request, OllamaChatBody, gateway.widest)
    gateway = gateway_of(gateway, body.model, track)
    turn = _turn(gateway, request, body, conversation_of(body), "messages")
    if not body.messages:
        return _loaded(gateway, request, turn, _message)
    ask = await turn.request(gateway, request, gateway.new_id("ollama"), cut=True)
    return await _answer(gateway, request, track, body, ask, turn.tooling, _message)


async def generate(gateway: Gateway, request: Request) -> Response | EventStream:
    track = track_of(request)
    body = await read_body(request, OllamaGenerateBody, gateway.widest)
    gateway = gateway_of(gateway, body.model, track)
    turn = _turn(gateway, request, body, prompt_of(body), "prompt")
    if not body.prompt:
        return _loaded(gateway, request, turn, _response)
    prompt = None
    if body.raw:  # read as /v1/completions reads it
        [prompt] = await gateway.encode([body.prompt])
    ask = await turn.request(gateway, request, gateway.new_id("ollama"), prompt=prompt, cut=True)
    return await _answer(gateway, request, track, body, ask, turn.tooling, _response)


def _turn(gateway: Gateway, request: Request, body: OllamaBody, messages: list[Line], prompt: str) -> ConversationTurn:
    sampling = with_bound(body.sampling(prompt), request)
    return ConversationTurn(
        messages=messages,
        sampling=sampling,
        tooling=ollama_tooling(body, gateway),
        options=thinking_options(gateway, _thinking(gateway, body)),
        shows_reasoning=body.think is not False,
    )


def _thinking(gateway: Gateway, body: OllamaBody) -> Thinking:
    """A model that does not reason is not asked to."""
    if not knows_effort(gateway) or body.think is None:
        return Thinking()
    return Thinking(is_on=body.think) if isinstance(body.think, bool) else Thinking(effort=body.think)


def _loaded(gateway: Gateway, request: Request, turn: ConversationTurn, fields: MakeFields) -> Response:
    """The answer to a client that only wants the model loaded, which it is: nothing runs. Raises InvalidRequest for
    parameters that an answer could not have."""
    sampling = replace(turn.sampling, max_tokens=None)
    make_text_request(sampling, [(0,)], gateway.card, request_id="", tenant=tenant_of(request))
    return json_response(_head(gateway) | fields("", [], "") | {"done_reason": "load", "done": True})


async def _answer(
    gateway: Gateway,
    request: Request,
    track: Track,
    body: OllamaBody,
    ask: TextRequest,
    tooling: Tooling,
    fields: MakeFields,
) -> Response | EventStream:
    ignored = Ignored()
    for name in (body.options.model_extra or {}) if body.options is not None else ():
        ignored.add(f"options.{name}")
    for name in body.model_extra or {}:
        ignored.add(name)
    if body.think and gateway.reasoning is None:
        ignored.add("think")
    answer = _OllamaAnswer(gateway, ask, tooling, fields)
    stream = body.stream is not False
    return await send(gateway, request, track, answer, stream=stream, ignored=ignored)


class _OllamaAnswer:
    """One answer, sent whole or as lines. A call is sent when it is complete."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling, fields: MakeFields) -> None:
        self._gateway = gateway
        self._ask = ask
        self._reader = AnswerReader(tooling)
        self._is_plain = tooling.form is None
        self._fields = fields
        self._head = _head(gateway)
        self._call: tuple[str, list[str]] | None = None
        self._begun_s = loop_time()
        self._first_s = 0.0

    async def whole(self, track: Track) -> Line:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Line] = []
        tally, last = UsageCounter(self._ask), TextDelta(index=0)
        async with aclosing(self._gateway.answer(self._ask, track, tally, is_plain=self._is_plain)) as pieces:
            async for piece in pieces:
                for text, complete, thoughts in self._read(piece):
                    texts.append(text)
                    calls += complete
                    reasoning.append(thoughts)
                last = piece
        usage = tally.usage()
        return self._head | self._fields("".join(texts), calls, "".join(reasoning)) | self._ending(last, usage)

    def events(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        writer = SseWriter(
            lambda index: self._line(TEXT_PLACEHOLDER, [], ""),
            channel,
            json_line,
            reasoning=lambda index: self._line("", [], TEXT_PLACEHOLDER),
        )
        return writer.behind_held(self._lines(track, writer))

    async def _lines(self, track: Track, writer: SseWriter) -> AsyncGenerator[bytes, None]:
        tally, last = UsageCounter(self._ask), TextDelta(index=0)
        answer = self._gateway.answer(self._ask, track, tally, is_plain=self._is_plain, writer=writer)
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                last = piece
                if lines := [json_line(self._line(*one)) for one in self._read(piece)]:
                    yield b"".join(lines)
        usage = tally.usage()
        yield json_line(self._head | self._fields("", [], "") | self._ending(last, usage))

    def _line(self, text: str, calls: list[Line], reasoning: str) -> Line:
        return self._head | self._fields(text, calls, reasoning) | {"done": False}

    def _read(self, piece: TextDelta) -> list[tuple[str, list[Line], str]]:
        """What a piece adds: texts, calls that it completes, and reasoning."""
        if piece.num_tokens and not self._first_s:
            self._first_s = loop_time()
        found: list[tuple[str, list[Line], str]] = []
        for part in self._reader.read(piece):
            if not isinstance(part, CallDelta) or part.name:
                found += self._completed()
            found += self._took(part)
        return found + self._completed() if piece.finish_reason is not None else found

    def _took(self, part: AnswerPart) -> list[tuple[str, list[Line], str]]:
        if isinstance(part, str):
            return [(part, [], "")]
        if isinstance(part, ReasoningDelta):
            return [("", [], part.text)]
        if part.name:
            self._call = (part.name, [])
        assert self._call is not None
        self._call[1].append(part.arguments)
        return []

    def _completed(self) -> list[tuple[str, list[Line], str]]:
        if self._call is None:
            return []
        (name, written), self._call = self._call, None
        return [("", [{"function": {"name": name, "arguments": call_input("".join(written))}}], "")]

    def _ending(self, last: TextDelta, usage: Usage) -> Line:
        """Durations in nanoseconds. `prompt_eval_duration` includes the wait for a worker."""
        end_s = loop_time()
        first_s = self._first_s or end_s
        return {
            "done": True,
            "done_reason": "length" if last.finish_reason is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(end_s - self._begun_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - self._begun_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(end_s - first_s),
        }


def _head(gateway: Gateway) -> Line:
    now = datetime.fromtimestamp(gateway.wall_clock(), UTC)
    return {"model": gateway.card.name, "created_at": now.isoformat().replace("+00:00", "Z")}


def _message(text: str, calls: list[Line], reasoning: str) -> Line:
    message: Line = {"role": "assistant", "content": text} | ({"thinking": reasoning} if reasoning else {})
    return {"message": message | {"tool_calls": calls} if calls else message}


def _response(text: str, calls: list[Line], reasoning: str) -> Line:
    return {"response": text} | ({"thinking": reasoning} if reasoning else {})


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
