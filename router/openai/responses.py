"""The API's answers, as its description shows them. Answers are written as plain dicts, since pydantic is too slow for
tokens; a test compares each of them with these."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """A field with a default is present only if it was requested."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Reply):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "timeout_error", "server_error", "cancelled"]
    param: str | None
    code: str


class ErrorReply(Reply):
    error: ErrorDetail


class PromptTokensDetails(Reply):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(Reply):
    audio_tokens: int
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(Reply):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ToldToken(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(ToldToken):
    top_logprobs: list[ToldToken]


class ChatLogprobs(Reply):
    content: list[ChosenToken]
    refusal: None


class ToldFunction(Reply):
    name: str
    arguments: str


class ToldCall(Reply):
    id: str
    type: Literal["function"]
    function: ToldFunction


class AssistantMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToldCall] = []


class ChatChoice(Reply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] = []


class ChatReply(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []


class ColumnLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: ColumnLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs = []
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionReply(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReply


class EmbeddingReply(Reply):
    """The vector as numbers, or in base64 as little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(Reply):
    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage


class ModelReply(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    weights: str | None
    type: Literal["model"]
    display_name: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    created_at: str


class ModelsReply(Reply):
    object: Literal["list"]
    data: list[ModelReply]
    has_more: Literal[False]
    first_id: str
    last_id: str


class TokenizeReply(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Reply):
    prompt: str


class HealthReply(Reply):
    status: Literal["ok"]


class ReadyReply(Reply):
    """`degraded`: what is wrong although requests are served; `reason`: why they are not."""

    ready: bool
    reason: str
    degraded: str
