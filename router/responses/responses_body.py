"""The body of a request. Items of its input and its tools are read in `router.responses.items`; this is their JSON
Schema. Fields that are not listed are accepted: Codex sends those of OpenAI's own service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from protos.errors import InvalidRequest
from router.conversation.schema_parts import STRING, TOOLS, Objects, function_schema, tools_list
from router.http.body_validation import Body, Schema, at_most, ranged
from router.http.harmless import Harmless, never, one_of
from router.text.sampling_request import SamplingRequest

_STORED = "nothing is stored here; send the whole input with each request"
REFUSALS: Mapping[str, Harmless] = {
    "background": one_of(False, why="answers are made while their client waits"),
    "conversation": never(_STORED),
    "previous_response_id": never(_STORED),
    "prompt": never("no prompts are stored here"),
    "store": one_of(False, why="answers are not stored"),
    "top_logprobs": one_of(0, why="ask /v1/chat/completions for logprobs"),
    "truncation": one_of("disabled", why="inputs are not cut here"),
}

_TEXT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": STRING},
}
_CONTENT = {"anyOf": [STRING, {"type": "array", "items": _TEXT}]}
_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"}, "call_id": STRING, "name": STRING, "arguments": STRING,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {"type": {"const": "function_call_output"}, "call_id": STRING, "output": _CONTENT},
        },
    ]
}  # fmt: skip
_TOOL = function_schema("parameters")
_TOOL["required"].append("type")
_TOOL["properties"]["type"] = {"const": "function"}
_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": STRING},
        },
    ]
}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    name: str | None = Field(default=None, description="a string")
    description: str | None = Field(default=None, description="a string")
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="true or false")

    model_config = ConfigDict(extra="allow", strict=True)


class AnswerTextConfig(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    format: TextFormat | None = Field(default=None, description='an object such as {"type": "text"}')


class ReasoningConfig(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="none, minimal, low, medium, high, xhigh or max"
    )


def _described(schema: dict[str, Any]) -> None:
    schema["properties"] |= {name: dict(one.schema) for name, one in REFUSALS.items()}


class InputBody(Body):
    """The parts of a prompt; the whole body of `input_tokens`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_described)
    harmless: ClassVar[Mapping[str, Harmless]] = REFUSALS

    model: str = Field(description="the name of a served model")
    input: Annotated[
        str | Objects, WithJsonSchema({"anyOf": [STRING, {"type": "array", "minItems": 1, "items": _ITEM}]})
    ] = Field(description="a string or a list of at least one item")
    instructions: str | None = Field(default=None, description="a string")
    tools: Annotated[Objects | None, *tools_list(_TOOL)] = TOOLS
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(_CHOICE)] = Field(
        default=None, description='none, auto, required or an object such as {"type": "function", "name": "f"}'
    )
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    text: AnswerTextConfig | None = Field(default=None, description='an object such as {"format": {"type": "text"}}')
    reasoning: ReasoningConfig | None = Field(default=None, description='an object such as {"effort": "low"}')

    def check_parts(self) -> None:
        if not self.input and not isinstance(self.input, str):
            raise InvalidRequest(
                "'input' is an empty list: it must be a string or a list of at least one item", param="input"
            )


class ResponsesBody(InputBody):
    """The last block is Baton's own, as in a chat."""

    max_output_tokens: int | None = ranged("max_tokens", "an integer")
    temperature: float | None = ranged("temperature", "a number")
    top_p: float | None = ranged("top_p", "a number")
    stream: bool | None = Field(default=None, description="true or false")
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(
        default=None, description="an object of at most 16 strings", json_schema_extra={"maxProperties": 16}
    )
    prompt_cache_key: str | None = Field(default=None, max_length=256, description="up to 256 characters")
    safety_identifier: str | None = Field(default=None, description="a string")
    user: str | None = Field(default=None, description="a string")

    top_k: int | None = ranged("top_k", "an integer")
    min_p: float | None = ranged("min_p", "a number")
    seed: int | None = ranged("seed", "an integer")
    priority: int | None = ranged("priority", "an integer")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256, description="1 to 256 characters")
    max_ttft_ms: float | None = ranged("max_ttft_ms", "a number of milliseconds")

    def sampling(self) -> SamplingRequest:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt", "max_ttft_ms")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingRequest(
            **given,
            max_tokens=self.max_output_tokens,
            session=self.prompt_cache_key or "",
            names={"prompt": "input", "max_tokens": "max_output_tokens"},
        )
