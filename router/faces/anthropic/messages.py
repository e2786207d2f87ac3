"""POST /v1/messages and /v1/messages/count_tokens.

message_start (usage of the prompt) ─▶ content_block_start ─▶ ..._delta ─▶ content_block_stop ─▶ ...
                                       message_delta (stop reason, usage) ─▶ message_stop
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError, ContextLengthExceeded, Overloaded, RateLimited, Unavailable
from protos.values import FinishReason
from router.faces.anthropic.message_blocks import conversation_of, is_prefilled, messages_tooling
from router.faces.anthropic.messages_body import MessagesBody, PromptBody, ThinkingConfig
from router.faces.conversation.parts import Ignored
from router.faces.conversation.rendering import Events, TurnRenderer, send
from router.faces.conversation.tooling import Tooling, call_input
from router.faces.conversation.turn import ConversationTurn, Thinking, knows_effort, thinking_options
from router.faces.endpoint import Endpoint, Face
from router.gateway import Gateway
from router.http.api import Api, json_response, named_event, retry_after
from router.http.sse import EventStream
from router.text.sampling_request import SamplingRequest, TextRequest
from router.text.text_stream import TextDelta, Usage
from router.text.tools.calls import CallDelta
from router.text.tools.formats import new_call_id

_PING = {"type": "ping"}


async def messages(gateway: Gateway, request: Request, body: MessagesBody) -> Response | EventStream:
    ignored = Ignored()
    turn = _turn(gateway, body, body.sampling(), ignored)
    ask = await turn.request(gateway, request, "msg_", cut=True)
    renderer = _MessageRenderer(gateway, ask, turn.tooling, max_tokens=body.max_tokens)
    return await send(renderer, request, stream=body.stream, ignored=ignored)


async def count_tokens(gateway: Gateway, request: Request, body: PromptBody) -> Response:
    ignored = Ignored()
    ids = await _turn(gateway, body, SamplingRequest(), ignored).prompt(gateway, request)
    return json_response({"input_tokens": len(ids)}, headers=ignored.headers())


def _turn(gateway: Gateway, body: PromptBody, sampling: SamplingRequest, ignored: Ignored) -> ConversationTurn:
    conversation = conversation_of(body, ignored)
    tooling = messages_tooling(body, gateway, ignored)
    shows_reasoning, options = _thinking(gateway, body, ignored)
    ignored.add_unlisted(body.output_config, "output_config.")
    ignored.add_unlisted(body)
    return ConversationTurn(
        messages=conversation,
        sampling=sampling,
        tooling=tooling,
        continue_final_message=is_prefilled(conversation),
        options=options,
        shows_reasoning=shows_reasoning,
    )


def _thinking(gateway: Gateway, body: PromptBody, ignored: Ignored) -> tuple[bool, Mapping[str, Any] | None]:
    """Whether reasoning is shown, and variables of the chat template. In this API a model reasons on request only:
    reasoning that cannot be turned off is left out."""
    thinking = body.thinking or ThinkingConfig()
    effort = body.output_config.effort if body.output_config is not None else None
    is_on = thinking.type != "disabled"
    if is_on and gateway.texts.reasoning is None:
        ignored.add("thinking")
    elif is_on:
        ignored.add_unlisted(thinking, "thinking.")
    if effort is not None and (not is_on or not knows_effort(gateway)):
        ignored.add("output_config.effort")
        effort = None
    options = thinking_options(gateway, Thinking(is_on=is_on, effort=effort))
    return is_on and thinking.display != "omitted", options


class _MessageRenderer(TurnRenderer):
    """Writes one message. `max_tokens`: the client's limit."""

    def __init__(self, gateway: Gateway, ask: TextRequest, tooling: Tooling, *, max_tokens: int) -> None:
        super().__init__(gateway, ask, tooling)
        self._max_tokens = max_tokens
        self._num_blocks = 0
        self._open = ""  # the type of the block that is not complete

    def frame(self, one: dict[str, Any]) -> bytes:
        return named_event(one)

    def placed(self, index: int, text: str) -> dict[str, Any]:
        return self._delta({"type": "text_delta", "text": text})

    def thought(self, index: int, text: str) -> dict[str, Any]:
        return self._delta({"type": "thinking_delta", "thinking": text})

    def read(self, piece: TextDelta, usage: Callable[[], Usage]) -> Events:
        """The prompt's usage is known with the first token."""
        return super().read(piece, usage) if piece.num_tokens or piece.finish_reason is not None else []

    def start(self, piece: TextDelta, usage: Usage) -> Events:
        """Begins the text, which the sink of an answer without tools and reasoning writes from here on."""
        events: Events = [{"type": "message_start", "message": self._message([], usage)}, _PING]
        if self.form is None and self.ask.reasoning is None and (piece.text or piece.finish_reason is None):
            events += self._begun({"type": "text", "text": ""})
        return events

    def text(self, text: str) -> Events:
        begun = [] if self._open == "text" else self._closed() + self._begun({"type": "text", "text": ""})
        return [*begun, self.placed(0, text)]

    def reasoning(self, text: str) -> Events:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begun = [] if self._open == "thinking" else self._closed() + self._begun(block)
        return [*begun, self.thought(0, text)]

    def call(self, delta: CallDelta) -> Events:
        begun = self._closed() + self._begun(self._block(delta)) if delta.name else []
        written = {"type": "input_json_delta", "partial_json": delta.arguments}
        return [*begun, self._delta(written)] if delta.arguments else begun

    def stop(self, reason: FinishReason) -> Events:
        return self._closed()

    def end(self, usage: Usage) -> bytes:
        ending = self._ending(usage)
        counts = ending.pop("usage")
        last = {"type": "message_delta", "delta": ending, "usage": counts}
        return named_event(last) + named_event({"type": "message_stop"})

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        written = ""
        for one in self.read(choices[0], lambda: usage):
            if one["type"] == "content_block_start":
                content.append(one["content_block"])
            elif one["type"] == "content_block_delta":
                delta = one["delta"]
                written += delta.get("partial_json", "")
                for name in delta.keys() & content[-1].keys() - {"type"}:
                    content[-1][name] += delta[name]
            elif one["type"] == "content_block_stop" and content[-1]["type"] == "tool_use":
                content[-1]["input"], written = call_input(written), ""
        return self._message(content, usage) | self._ending(usage)

    def _block(self, call: CallDelta) -> dict[str, Any]:
        assert self.form is not None
        return {"type": "tool_use", "id": new_call_id(self.form, prefix="toolu_"), "name": call.name, "input": {}}

    def _begun(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._open = block["type"]
        self._num_blocks += 1
        return [{"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _closed(self) -> list[dict[str, Any]]:
        """Ends the open block. Clients drop reasoning without a signature; it is not checked here."""
        was_open, self._open = self._open, ""
        if not was_open:
            return []
        signature = {"type": "signature_delta", "signature": f"baton-{self.ask.request_id}"}
        signed = [self._delta(signature)] if was_open == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.ask.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.gateway.card.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(usage),
        }

    def _ending(self, usage: Usage) -> dict[str, Any]:
        last = self.last
        if last.finish_reason is FinishReason.LENGTH:
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif last.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.has_called else "end_turn"
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


OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_status(error: BatonError) -> int:
    """429 is for a tenant's own limits; where the server has no room, this API has 529."""
    if isinstance(error, Unavailable) or (isinstance(error, Overloaded) and not isinstance(error, RateLimited)):
        return OVERLOADED
    return error.http_status


def error_body(error: BatonError) -> dict[str, Any]:
    """Writes an error as this API does. Its clients shorten a conversation when they read "prompt is too long"."""
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = Api(
    name="anthropic",
    paths=("/v1/messages",),
    error_body=error_body,
    error_event=lambda error: named_event({"type": "error", "error": error_body(error)["error"] | retry_after(error)}),
    error_status=error_status,
    keep_alive=named_event({"type": "ping"}),
    id_header=b"request-id",
    key_header=b"x-api-key",
    mark=b"anthropic-version",
)

ANTHROPIC_FACE = Face(
    api=ANTHROPIC,
    endpoints=(
        Endpoint(
            "POST", "/v1/messages", messages,
            "An answer to a conversation, whole or as events, in the form of Anthropic's Messages API",
            track="messages", body=MessagesBody,
        ),
        Endpoint(
            "POST", "/v1/messages/count_tokens", count_tokens, "How many tokens a conversation has", body=PromptBody
        ),
    ),
)  # fmt: skip
