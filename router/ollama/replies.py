"""The answers of Ollama's API, as the API's description shows them; a test compares each answer with these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from router.openai.responses import Reply


class OllamaErrorReply(Reply):
    error: str


class OllamaFunction(Reply):
    name: str
    arguments: dict[str, Any]


class OllamaCall(Reply):
    function: OllamaFunction


class OllamaMessage(Reply):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = Field(default_factory=list)


class OllamaAnswerReply(Reply):
    """Durations are in nanoseconds; an answer without a prompt has no counts."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    total_duration: int = 0
    load_duration: Literal[0] = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaChatReply(OllamaAnswerReply):
    message: OllamaMessage


class OllamaGenerateReply(OllamaAnswerReply):
    response: str
    thinking: str = ""


class OllamaModelReply(Reply):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaLoadedModelReply(Reply):
    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: dict[str, Any]
    expires_at: str
    context_length: int


class OllamaLoadedReply(Reply):
    models: list[OllamaLoadedModelReply]


class OllamaEmbedReply(Reply):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: Literal[0]
    prompt_eval_count: int


class OllamaEmbeddingsReply(Reply):
    embedding: list[float]


class OllamaTagsReply(Reply):
    models: list[OllamaModelReply]


class OllamaShowReply(Reply):
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersionReply(Reply):
    version: str
