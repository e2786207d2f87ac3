"""The Messages API's answers, as the API's description shows them; a test compares each answer with these."""

from __future__ import annotations

from typing import Any, Literal

from router.openai.responses import Reply


class MessagesErrorDetail(Reply):
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "timeout_error",
        "request_too_large", "rate_limit_error", "overloaded_error", "api_error",
    ]  # fmt: skip
    message: str


class MessagesErrorReply(Reply):
    type: Literal["error"]
    error: MessagesErrorDetail


class TextBlock(Reply):
    type: Literal["text"]
    text: str


class ThinkingBlock(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesOutputDetails(Reply):
    thinking_tokens: int


class MessagesUsage(Reply):
    """The prompt has as many tokens as the three counts of input together."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesOutputDetails


class MessageReply(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCountReply(Reply):
    input_tokens: int
