"""POST /api/chat and /api/generate: lines of JSON while the answer comes, the last with its counts and times."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from protos.event_loop import loop_time
from protos.values import FinishReason
from router.conversation.parts import Ignored
from router.conversation.tooling import AnswerReader, Tooling
from router.conversation.turn import ConversationTurn
from router.gateway import Gateway
from router.http.body import read_body, with_bound
from router.http.errors import json_response
from router.http.framing import json_line
from router.http.middleware import tenant_of
from router.http.response_channel import ResponseChannel
from router.http.sse import TEXT_PLACEHOLDER, EventStream, SseWriter, while_connected
from router.metrics import Track
from router.ollama.conversations import conversation_of, ollama_tooling, prompt_of
from router.ollama.models import check_name
from router.ollama.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router.text.sampling_request import TextRequest, make_text_request
from router.text.text_stream import TextDelta, Usage, UsageCounter
from router.text.tool_call_formats import Part

Line = dict[str, Any]
Said = Callable[[str, list[Line]], Line]


async def chat(gateway: Gateway, request: Request, track: Track) -> Response | EventStream:
    body = await read_body(request, OllamaChatBody, gateway.card)
    turn = _turn(gateway, request, body, conversation_of(body), "messages")
    if not body.messages:
        return _loaded(gateway, request, turn, _message)
    ask = await turn.request(gateway, request, gateway.new_id("ollama"), cut=True)
    return await _answer(gateway, request, track, body, ask, turn.tooling, _message)


async def generate(gateway: Gateway, request: Request, track: Track) -> Response | EventStream:
    body = await read_body(request, OllamaGenerateBody, gateway.card)
    turn = _turn(gateway, request, body, prompt_of(body), "prompt")
    if not body.prompt:
        return _loaded(gateway, request, turn, _response)
    prompt = None
    if body.raw:  # read as /v1/completions reads it
        [prompt] = await gateway.encode([body.prompt])
    ask = await turn.request(gateway, request, gateway.new_id("ollama"), prompt=prompt, cut=True)
    return await _answer(gateway, request, track, body, ask, turn.tooling, _response)


def _turn(gateway: Gateway, request: Request, body: OllamaBody, messages: list[Line], prompt: str) -> ConversationTurn:
    check_name(gateway, body.model)
    sampling = with_bound(body.sampling(prompt), request)
    return ConversationTurn(messages=messages, sampling=sampling, tooling=ollama_tooling(body, gateway))


def _loaded(gateway: Gateway, request: Request, turn: ConversationTurn, said: Said) -> Response:
    """The answer to a client that only wants the model loaded, which it is: nothing runs. Raises InvalidRequest for
    parameters that an answer could not have."""
    sampling = replace(turn.sampling, max_tokens=None)
    make_text_request(sampling, [(0,)], gateway.card, request_id="", tenant=tenant_of(request))
    return json_response(_head(gateway) | said("", []) | {"done_reason": "load", "done": True})


async def _answer(
    gateway: Gateway, request: Request, track: Track, body: OllamaBody, ask: TextRequest, tooling: Tooling, said: Said
) -> Response | EventStream:
    ignored = Ignored()
    for name in (body.options.model_extra or {}) if body.options is not None else ():
        ignored.add(f"options.{name}")
    for name in body.model_extra or {}:
        ignored.add(name)
    answer = _OllamaAnswer(gateway, ask, tooling, said)
    if body.stream is not False:
        headers = ignored.raw_headers()
        return EventStream(partial(answer.lines, track), track, stall_s=gateway.stall_s, headers=headers)
    whole = await while_connected(request.scope, request.receive, answer.whole(track))
    return json_response(whole, headers=ignored.headers())


class _OllamaAnswer:
    """One answer, sent whole or as lines. A call is sent when it is complete."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling, said: Said) -> None:
        self._gateway = gateway
        self._ask = ask
        self._reader = AnswerReader(tooling)
        self._is_plain = tooling.form is None
        self._said = said
        self._head = _head(gateway)
        self._call: tuple[str, list[str]] | None = None
        self._begun_s = loop_time()
        self._first_s = 0.0

    async def whole(self, track: Track) -> Line:
        texts: list[str] = []
        calls: list[Line] = []
        tally, last = UsageCounter(self._ask), TextDelta(index=0)
        async with aclosing(self._gateway.answer(self._ask, track, tally, is_plain=self._is_plain)) as pieces:
            async for piece in pieces:
                for text, complete in self._read(piece):
                    texts.append(text)
                    calls += complete
                last = piece
        usage = tally.usage()
        track.count(usage)
        return self._head | self._said("".join(texts), calls) | self._ending(last, usage)

    async def lines(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        tally, last = UsageCounter(self._ask), TextDelta(index=0)
        writer = SseWriter(lambda index: self._line(TEXT_PLACEHOLDER, []), channel, json_line)
        answer = self._gateway.answer(self._ask, track, tally, is_plain=self._is_plain, writer=writer)
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    last = piece
                    if lines := [json_line(self._line(text, calls)) for text, calls in self._read(piece)]:
                        yield writer.held() + b"".join(lines)
        except Exception:
            if held := writer.held():
                yield held
            raise
        usage = tally.usage()
        track.count(usage)
        yield writer.held() + json_line(self._head | self._said("", []) | self._ending(last, usage))

    def _line(self, text: str, calls: list[Line]) -> Line:
        return self._head | self._said(text, calls) | {"done": False}

    def _read(self, piece: TextDelta) -> list[tuple[str, list[Line]]]:
        """What a piece adds: texts, and calls that it completes."""
        if piece.num_tokens and not self._first_s:
            self._first_s = loop_time()
        found: list[tuple[str, list[Line]]] = []
        for part in self._reader.read(piece):
            if isinstance(part, str) or part.name:
                found += self._completed()
            found += self._took(part)
        return found + self._completed() if piece.finish_reason is not None else found

    def _took(self, part: Part) -> list[tuple[str, list[Line]]]:
        if isinstance(part, str):
            return [(part, [])]
        if part.name:
            self._call = (part.name, [])
        assert self._call is not None
        self._call[1].append(part.arguments)
        return []

    def _completed(self) -> list[tuple[str, list[Line]]]:
        if self._call is None:
            return []
        (name, written), self._call = self._call, None
        return [("", [{"function": {"name": name, "arguments": _arguments("".join(written))}}])]

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


def _message(text: str, calls: list[Line]) -> Line:
    message: Line = {"role": "assistant", "content": text}
    return {"message": message | {"tool_calls": calls} if calls else message}


def _response(text: str, calls: list[Line]) -> Line:
    return {"response": text}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _arguments(written: str) -> Line:
    """What the model wrote that is no object is under `arguments`."""
    try:
        found = orjson.loads(written or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": written}
