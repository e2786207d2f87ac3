"""POST /v1/responses and /v1/responses/input_tokens.

response.created ─▶ response.in_progress ─▶ items ─▶ response.completed | .incomplete | .failed

message:        output_item.added ─▶ content_part.added ─▶ output_text.delta ... ─▶ output_text.done
                ─▶ content_part.done ─▶ output_item.done
reasoning:      the same, with reasoning_text for output_text
function_call:  output_item.added ─▶ function_call_arguments.delta ... ─▶ function_call_arguments.done
                ─▶ output_item.done"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError, ContextLengthExceeded, Overloaded
from protos.values import FinishReason
from router.faces.conversation.parts import Ignored
from router.faces.conversation.rendering import Events, TurnRenderer, send
from router.faces.conversation.tooling import Tooling
from router.faces.conversation.turn import ConversationTurn, Thinking, knows_effort, thinking_options
from router.faces.endpoint import Endpoint, Face
from router.faces.responses.items import conversation_of, responses_tooling
from router.faces.responses.responses_body import InputBody, ResponsesBody
from router.gateway import Gateway
from router.http.api import json_response, named_event, retry_after
from router.http.sse import EventStream
from router.text.sampling_request import SamplingRequest, TextRequest
from router.text.text_stream import TextDelta, Usage
from router.text.tools.calls import CallDelta
from router.text.tools.formats import new_call_id

Event = dict[str, Any]


async def responses(gateway: Gateway, request: Request, body: ResponsesBody) -> Response | EventStream:
    ignored = Ignored()
    turn = _turn(gateway, body, body.sampling(), ignored)
    ask = await turn.request(gateway, request, "resp_")
    renderer = _ResponseRenderer(gateway, body, ask, turn.tooling)
    return await send(renderer, request, stream=body.stream, ignored=ignored)


async def count_input_tokens(gateway: Gateway, request: Request, body: InputBody) -> Response:
    ignored = Ignored()
    ids = await _turn(gateway, body, SamplingRequest(names={"prompt": "input"}), ignored).prompt(gateway, request)
    counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
    return json_response(counted, headers=ignored.headers())


def _turn(gateway: Gateway, body: InputBody, sampling: SamplingRequest, ignored: Ignored) -> ConversationTurn:
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None and not knows_effort(gateway):
        ignored.add("reasoning.effort")
        effort = None
    turn = ConversationTurn(
        messages=conversation_of(body, ignored),
        sampling=sampling,
        tooling=responses_tooling(body, gateway, ignored),
        options=thinking_options(gateway, Thinking(effort=effort)),
    )
    ignored.add_unlisted(body.reasoning, "reasoning.")
    ignored.add_unlisted(body.text, "text.")
    ignored.add_unlisted(body)
    return turn


class _ResponseRenderer(TurnRenderer):
    """Writes one response."""

    has_sinks = False

    def __init__(self, gateway: Gateway, body: ResponsesBody, ask: TextRequest, tooling: Tooling) -> None:
        super().__init__(gateway, ask, tooling)
        self._output: list[Event] = []
        self._texts: list[str] = []  # of the item that is not complete
        self._is_open = False
        self._num_events = 0
        self._head = self._described(body)

    def _described(self, body: ResponsesBody) -> Event:
        sampling = self.ask.jobs[0].sampling
        sent = body.model_dump(include={"tools", "tool_choice"}, exclude_unset=True)
        form = body.text.format if body.text is not None and body.text.format is not None else None
        shown = form.model_dump(by_alias=True, exclude_none=True) if form is not None else {"type": "text"}
        return {
            "id": self.ask.request_id,
            "object": "response",
            "created_at": int(self.gateway.wall_clock()),
            "model": self.gateway.card.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": shown},
            "tool_choice": sent.get("tool_choice") or "auto",
            "tools": sent.get("tools") or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def frame(self, one: Event) -> bytes:
        self._num_events += 1
        return named_event(one | {"sequence_number": self._num_events - 1})

    def start(self, piece: TextDelta, usage: Usage) -> Events:
        begun = self._response("in_progress", None, None)
        return [{"type": f"response.{state}", "response": begun} for state in ("created", "in_progress")]

    def end(self, usage: Usage) -> bytes:
        status, details = self._status()
        return self.frame({"type": f"response.{status}", "response": self._response(status, details, usage)})

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> Event:
        self.read(choices[0], lambda: usage)
        return self._response(*self._status(), usage)

    def failure(self, error: BatonError) -> bytes:
        failed = self._response("failed", None, None) | {"error": _error(error)}
        return self.frame({"type": "response.failed", "response": failed})

    def _status(self) -> tuple[str, Event | None]:
        if self.last.finish_reason is FinishReason.LENGTH:
            return "incomplete", {"reason": "max_output_tokens"}
        return "completed", None

    def _response(self, status: str, details: Event | None, usage: Usage | None) -> Event:
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": list(self._output),
            "usage": usage_of(usage) if usage is not None else None,
        }

    # -- items ---------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> Events:
        return self._said("message", text)

    def reasoning(self, text: str) -> Events:
        return self._said("reasoning", text)

    def _said(self, kind: str, text: str) -> Events:
        events: Events = []
        if not self._is_open or self._output[-1]["type"] != kind:
            events = self._close("completed") + self._open_text(kind)
        self._texts.append(text)
        return [*events, self._text_event("delta") | {"delta": text}]

    def call(self, delta: CallDelta) -> Events:
        events = self._close("completed") + self._open_call(delta) if delta.name else []
        if delta.arguments:
            self._texts.append(delta.arguments)
            events.append(self._of_item("response.function_call_arguments.delta") | {"delta": delta.arguments})
        return events

    def stop(self, reason: FinishReason) -> Events:
        return self._close("completed" if reason is FinishReason.STOP else "incomplete")

    def _open_text(self, kind: str) -> list[Event]:
        """Begins a message or reasoning."""
        if kind == "message":
            item = {"type": "message", "role": "assistant", "content": [], "id": self.gateway.new_id("msg_")}
        else:
            item = {"type": "reasoning", "summary": [], "content": [], "id": self.gateway.new_id("rs_")}
        self._begin(item)
        part = self._of_item("response.content_part.added") | {"content_index": 0, "part": _text_part(kind, "")}
        return [self._item_event("added"), part]

    def _open_call(self, part: CallDelta) -> list[Event]:
        assert self.form is not None
        call = {"type": "function_call", "call_id": new_call_id(self.form), "name": part.name, "arguments": ""}
        self._begin(call | {"id": self.gateway.new_id("fc_")})
        return [self._item_event("added")]

    def _begin(self, item: Event) -> None:
        self._output.append(item | {"status": "in_progress"})
        self._is_open = True

    def _close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        text = "".join(self._texts)
        self._texts.clear()
        item = self._output[-1] = self._output[-1] | {"status": status}
        if item["type"] != "function_call":
            whole = _text_part(item["type"], text)
            item["content"] = [whole]
            part = self._of_item("response.content_part.done") | {"content_index": 0, "part": whole}
            events = [self._text_event("done") | {"text": text}, part]
        else:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events = [self._of_item("response.function_call_arguments.done") | done]
        return [*events, self._item_event("done")]

    def _item_event(self, state: str) -> Event:
        where = {"output_index": len(self._output) - 1}
        return {"type": f"response.output_item.{state}", "item": dict(self._output[-1])} | where

    def _of_item(self, kind: str) -> Event:
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _text_event(self, state: str) -> Event:
        if self._output[-1]["type"] == "reasoning":
            return self._of_item(f"response.reasoning_text.{state}") | {"content_index": 0}
        return self._of_item(f"response.output_text.{state}") | {"content_index": 0, "logprobs": []}


def usage_of(usage: Usage) -> Event:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_part(kind: str, text: str) -> Event:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _error(error: BatonError) -> Event:
    """Uses the codes that Codex expects, and gives the time to wait in the message."""
    code, message = "server_error", error.message
    if isinstance(error, ContextLengthExceeded):
        code = "context_length_exceeded"
    elif isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    if again := retry_after(error):
        message = f"{message.rstrip('.')}. Please try again in {again['retry_after']}s."
    return {"code": code, "message": message} | again


RESPONSES_FACE = Face(
    endpoints=(
        Endpoint(
            "POST", "/v1/responses", responses,
            "An answer to items of a conversation, whole or as events, in the form of OpenAI's Responses API",
            track="responses", body=ResponsesBody,
        ),
        Endpoint(
            "POST", "/v1/responses/input_tokens", count_input_tokens, "How many tokens an input has", body=InputBody
        ),
    ),
    absent={
        "/v1/responses/": "responses are not stored; send the whole input with each request",
        "/v1/conversations": "conversations are not stored; send the whole input with each request",
    },
)  # fmt: skip
