"""The bodies of requests. Messages, tools and their blocks are read in `router.anthropic.message_blocks`; this is their
JSON Schema. Fields that are not listed are accepted: clients send those of the API's latest beta.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from router.conversation.schema_parts import STRING, TOOLS, Objects, function_schema, tools_list
from router.http.body_validation import Body, FirstWrong, Schema, at_most, ranged
from router.text.sampling_request import MAX_STOP_CHARS, MAX_STOPS, SamplingRequest

_TEXT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": STRING, "cache_control": {"type": ["object", "null"]}},
}
_TEXTS = {"anyOf": [STRING, {"type": "array", "items": _TEXT}]}
_THOUGHT = {
    "type": "object",
    "required": ["type", "thinking"],
    "properties": {"type": {"const": "thinking"}, "thinking": STRING},
}
_CALL = {
    "type": "object",
    "required": ["type", "id", "name", "input"],
    "properties": {"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": {"type": "object"}},
}
_SEARCHED = {
    "type": "object",
    "required": ["type", "source", "title", "content"],
    "properties": {
        "type": {"const": "search_result"}, "source": STRING, "title": STRING,
        "content": {"type": "array", "items": _TEXT},
    },
}  # fmt: skip
_DOCUMENT = {
    "type": "object",
    "required": ["type", "source"],
    "properties": {
        "type": {"const": "document"},
        "title": {"type": ["string", "null"]},
        "context": {"type": ["string", "null"]},
        "source": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["type", "data"],
                    "properties": {"type": {"const": "text"}, "data": STRING},
                },
                {
                    "type": "object",
                    "required": ["type", "content"],
                    "properties": {"type": {"const": "content"}, "content": _TEXTS},
                },
            ]
        },
    },
}
_REFERENCE = {
    "type": "object",
    "required": ["type", "tool_name"],
    "properties": {"type": {"const": "tool_reference"}, "tool_name": STRING},
}
_READ = (_TEXT, _SEARCHED, _DOCUMENT, _REFERENCE)
_RESULT = {
    "type": "object",
    "required": ["type", "tool_use_id"],
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": STRING,
        "content": {"anyOf": [STRING, {"type": "array", "items": {"anyOf": list(_READ)}}, {"type": "null"}]},
    },
}


def _turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


_MESSAGE = {
    "anyOf": [_turn("user", *_READ, _RESULT), _turn("assistant", _TEXT, _THOUGHT, _CALL), _turn("system", _TEXT)]
}
_TOOL = function_schema("input_schema", needs_schema=True)
_TOOL["properties"]["type"] = {"enum": ["custom", None]}
_CHOICE = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": STRING,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
}

_THINKING = {
    "type": ["object", "null"],
    "properties": {"type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]}},
}


class ToolChosen(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["auto", "any", "tool", "none"] = Field(description="auto, any, tool or none")
    name: str | None = Field(default=None, description="the name of one of the tools")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true or false")


class OutputFormat(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["json_schema"] = Field(description="json_schema")
    schema_: Schema = Field(alias="schema")


class OutputConfig(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    format: OutputFormat | None = Field(default=None, description='an object: {"type": "json_schema", "schema": {...}}')
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="low, medium, high, xhigh or max"
    )


class PromptBody(Body):
    """The parts of a prompt; the whole body of `count_tokens`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(description="the name of a served model")
    messages: Annotated[Objects, WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})] = Field(
        min_length=1, description="a list of at least one message"
    )
    system: Annotated[str | Objects | None, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})] = Field(
        default=None, description="a string or a list of text blocks"
    )
    tools: Annotated[Objects | None, *tools_list(_TOOL)] = TOOLS
    tool_choice: Annotated[ToolChosen | None, WithJsonSchema(_CHOICE)] = Field(
        default=None, description='an object such as {"type": "auto"}'
    )
    output_config: OutputConfig | None = Field(default=None, description="an object")
    output_format: OutputFormat | None = Field(
        default=None, description='an object: {"type": "json_schema", "schema": {...}}'
    )
    thinking: Annotated[dict[str, Any] | None, WithJsonSchema(_THINKING)] = Field(
        default=None, description='an object such as {"type": "enabled"}'
    )
    cache_control: dict[str, Any] | None = Field(default=None, description="an object: all is cached")


class MessagesBody(PromptBody):
    """The last block is Baton's own, as in a chat."""

    max_tokens: int = ranged("max_tokens", "an integer", ...)
    metadata: dict[str, Any] | None = Field(default=None, description="an object")
    service_tier: Literal["auto", "standard_only"] | None = Field(default=None, description="auto or standard_only")
    stop_sequences: Annotated[list[str] | None, FirstWrong(), at_most(MAX_STOPS)] = Field(
        default=None,
        description=f"a list of at most {MAX_STOPS} strings",
        json_schema_extra={
            "maxItems": MAX_STOPS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        },
    )
    stream: bool | None = Field(default=None, description="true or false")
    temperature: float | None = ranged("temperature", "a number")
    top_p: float | None = ranged("top_p", "a number")
    top_k: int | None = ranged("top_k", "an integer")

    seed: int | None = ranged("seed", "an integer")
    priority: int | None = ranged("priority", "an integer")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256, description="1 to 256 characters")
    max_ttft_ms: float | None = ranged("max_ttft_ms", "a number of milliseconds")

    def sampling(self) -> SamplingRequest:
        names = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "max_ttft_ms")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingRequest(
            **given,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            names={"prompt": "messages", "stop": "stop_sequences"},
        )
