"""POST /api/chat and /api/generate: lines of JSON while the answer comes, the last with its counts and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, UnsupportedParameter
from protos.event_loop import loop_time
from protos.values import FinishReason
from router.faces.conversation.parts import Ignored, placed
from router.faces.conversation.rendering import Events, TurnRenderer, send
from router.faces.conversation.tooling import Tooling, ToolUse, call_input, tooling_of
from router.faces.conversation.turn import ConversationTurn, Thinking, knows_effort, text_request, thinking_options
from router.faces.ollama.ollama_bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router.gateway import Gateway
from router.http.api import json_line, json_response
from router.http.middleware import track_of
from router.http.sse import EventStream
from router.request_metrics import Track
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, Usage
from router.text.tools.calls import CallDelta

Line = dict[str, Any]
MakeFields = Callable[[str, list[Line], str], Line]
"""The fields of an answer's line for a text, calls and reasoning."""


async def chat(gateway: Gateway, request: Request, body: OllamaChatBody) -> Response | EventStream:
    turn = _turn(gateway, body, conversation_of(body), "messages")
    return await _answer(gateway, request, body, turn, _message, loads=not body.messages)


async def generate(gateway: Gateway, request: Request, body: OllamaGenerateBody) -> Response | EventStream:
    turn, prompt = _turn(gateway, body, prompt_of(body), "prompt"), None
    if body.raw and body.prompt:  # read as /v1/completions reads it
        [prompt] = await gateway.texts.encode([body.prompt])
    return await _answer(gateway, request, body, turn, _response, loads=not body.prompt, prompt=prompt)


def _turn(gateway: Gateway, body: OllamaBody, messages: list[Line], prompt: str) -> ConversationTurn:
    return ConversationTurn(
        messages=messages,
        sampling=body.sampling(prompt),
        tooling=ollama_tooling(body, gateway),
        options=thinking_options(gateway, _thinking(gateway, body)),
        shows_reasoning=body.think is not False,
    )


def _thinking(gateway: Gateway, body: OllamaBody) -> Thinking:
    """Never requests reasoning of a model that does not reason."""
    if not knows_effort(gateway) or body.think is None:
        return Thinking()
    return Thinking(is_on=body.think) if isinstance(body.think, bool) else Thinking(effort=body.think)


async def _answer(
    gateway: Gateway,
    request: Request,
    body: OllamaBody,
    turn: ConversationTurn,
    fields: MakeFields,
    *,
    loads: bool,
    prompt: tuple[int, ...] | None = None,
) -> Response | EventStream:
    """A client that only `loads` the model has an answer at once, or InvalidRequest for parameters that no answer could
    have."""
    if loads:
        text_request(gateway, request, "ollama", replace(turn.sampling, max_tokens=None), [(0,)])
        return json_response(_head(gateway) | fields("", [], "") | {"done_reason": "load", "done": True})
    ask = await turn.request(gateway, request, "ollama", prompt=prompt, cut=True)
    ignored = Ignored()
    ignored.add_unlisted(body.options, "options.")
    ignored.add_unlisted(body)
    if body.think and gateway.texts.reasoning is None:
        ignored.add("think")
    renderer = _OllamaRenderer(gateway, ask, turn.tooling, track_of(request), fields)
    return await send(renderer, request, stream=body.stream is not False, ignored=ignored)


class _OllamaRenderer(TurnRenderer):
    """Writes one answer as lines: a text, calls and reasoning each. A call is sent when it is complete."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling, track: Track, fields: MakeFields) -> None:
        super().__init__(gateway, ask, tooling)
        self._fields = fields
        self._head = _head(gateway)
        self._call: tuple[str, list[str]] | None = None
        self._track = track
        self._begun_s = loop_time()

    def frame(self, one: tuple[str, list[Line], str]) -> bytes:
        return json_line(self._head | self._fields(*one) | {"done": False})

    def placed(self, index: int, text: str) -> tuple[str, list[Line], str]:
        return text, [], ""

    def thought(self, index: int, text: str) -> tuple[str, list[Line], str]:
        return "", [], text

    def text(self, text: str) -> Events:
        return [*self._completed(), self.placed(0, text)]

    def reasoning(self, text: str) -> Events:
        return [*self._completed(), self.thought(0, text)]

    def call(self, delta: CallDelta) -> Events:
        completed = self._completed() if delta.name else []
        self._call = self._call or (delta.name, [])
        self._call[1].append(delta.arguments)
        return completed

    def stop(self, reason: FinishReason) -> Events:
        return self._completed()

    def _completed(self) -> Events:
        if self._call is None:
            return []
        (name, written), self._call = self._call, None
        return [("", [{"function": {"name": name, "arguments": call_input("".join(written))}}], "")]

    def end(self, usage: Usage) -> bytes:
        return json_line(self._head | self._fields("", [], "") | self._ending(usage))

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> Line:
        lines = self.read(choices[0], lambda: usage)
        text, thoughts = "".join(line[0] for line in lines), "".join(line[2] for line in lines)
        calls = [call for line in lines for call in line[1]]
        return self._head | self._fields(text, calls, thoughts) | self._ending(usage)

    def _ending(self, usage: Usage) -> Line:
        end_s = loop_time()
        first_s = self._track.times(0).first_s or end_s
        return {
            "done": True,
            "done_reason": "length" if self.last.finish_reason is FinishReason.LENGTH else "stop",
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


Template = dict[str, Any]


def conversation_of(body: OllamaChatBody) -> list[Template]:
    """Reads the messages. Calls have no ids in this API: they are numbered, and results belong to them in order. Raises
    InvalidRequest."""
    messages: list[Template] = []
    waiting: list[str] = []
    num_calls = 0
    for where, message in placed(body.messages, "messages"):
        if message.images:
            problem = f"'{where}.images' has images: this model reads text only; leave them out"
            raise UnsupportedParameter(problem, param=f"{where}.images")
        shown: Template = {"role": message.role}
        if message.content or not message.tool_calls:
            shown["content"] = message.content or ""
        if message.tool_name is not None:
            shown["name"] = message.tool_name
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.role == "tool" and waiting:
            shown["tool_call_id"] = waiting.pop(0)
        if message.tool_calls:
            if message.role != "assistant":
                problem = f"'{where}.tool_calls' is only allowed in an assistant's message: leave it out"
                raise InvalidRequest(problem, param=f"{where}.tool_calls")
            shown["tool_calls"] = []
            for call in message.tool_calls:
                num_calls += 1
                waiting.append(f"{num_calls:09}")
                function = {"name": call.function.name, "arguments": call.function.arguments}
                shown["tool_calls"].append({"id": waiting[-1], "type": "function", "function": function})
        messages.append(shown)
    return messages


def prompt_of(body: OllamaGenerateBody) -> list[Template]:
    """A prompt as a conversation of one turn."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def ollama_tooling(body: OllamaBody, gateway: Gateway) -> Tooling:
    """Raises InvalidRequest."""
    specs = [tool.function for tool in (body.tools if isinstance(body, OllamaChatBody) else None) or ()]
    functions = [spec.to_function() for spec in specs]
    use = ToolUse(shown=[spec.shown() for spec in specs], functions=functions) if specs else None
    return tooling_of(gateway, use, body.answer_schema(), param="format")
