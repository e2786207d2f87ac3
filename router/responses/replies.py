"""The Responses API's answers, as the API's description shows them; a test compares each answer with these."""

from __future__ import annotations

from typing import Any, Literal

from router.openai.responses import Reply

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Reply):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class OutputCall(Reply):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponsesUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseError(Reply):
    code: str
    message: str


class ResponsesReply(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage


class InputTokensReply(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int
