"""The bodies of requests, the parts of messages among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.faces.conversation.tooling import MAX_TOOLS, TOOLS, FunctionSpec, Parameters, parameters_field
from router.http.body import ByKind, FirstWrong, OpenBody, OtherPart, Schema, at_most, ranged
from router.text.sampling_request import MAX_STOP_CHARS, MAX_STOPS, SamplingRequest


class TextBlock(OpenBody):
    """`cache_control` changes nothing: every prompt is cached."""

    type: Literal["text"]
    text: str = Field(description="a string")
    cache_control: dict[str, Any] | None = Field(default=None, description='an object such as {"type": "ephemeral"}')


Texts = Annotated[list[Annotated[TextBlock | OtherPart, ByKind()]], FirstWrong()]


class ThinkingBlock(OpenBody):
    type: Literal["thinking"]
    thinking: str = Field(description="a string")


class ToolUseBlock(OpenBody):
    type: Literal["tool_use"]
    id: str = Field(description="a string")
    name: str = Field(description="a string")
    input: dict[str, Any] = Field(description="an object")


class SearchResultBlock(OpenBody):
    type: Literal["search_result"]
    title: str = Field(description="a string")
    source: str = Field(description="a string")
    content: Texts = Field(description="a list of objects")


class TextSource(OpenBody):
    type: Literal["text"]
    data: str = Field(description="a string")


class ContentSource(OpenBody):
    type: Literal["content"]
    content: str | Texts = Field(description="a string or a list of objects")


class DocumentBlock(OpenBody):
    type: Literal["document"]
    title: str | None = Field(default=None, description="a string")
    context: str | None = Field(default=None, description="a string")
    source: Annotated[TextSource | ContentSource | OtherPart, ByKind()] = Field(description="an object")


class ToolReferenceBlock(OpenBody):
    type: Literal["tool_reference"]
    tool_name: str = Field(description="a string")


ReadBlock = TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock


class ToolResultBlock(OpenBody):
    type: Literal["tool_result"]
    tool_use_id: str = Field(description="a string")
    is_error: Any = None
    content: str | Annotated[list[Annotated[ReadBlock | OtherPart, ByKind()]], FirstWrong()] | None = Field(
        default=None, description="a string or a list of objects"
    )


class UserTurn(OpenBody):
    role: Literal["user"]
    content: str | Annotated[list[Annotated[ReadBlock | ToolResultBlock | OtherPart, ByKind()]], FirstWrong()] = Field(
        description="a string or a list of blocks"
    )


class AssistantTurn(OpenBody):
    role: Literal["assistant"]
    content: (
        str | Annotated[list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock | OtherPart, ByKind()]], FirstWrong()]
    ) = Field(description="a string or a list of blocks")


class SystemTurn(OpenBody):
    role: Literal["system"]
    content: str | Texts = Field(description="a string or a list of blocks")


class AnthropicTool(FunctionSpec):
    type: Literal["custom"] | None = None
    parameters: Parameters = parameters_field(..., alias="input_schema")


class ToolChosen(OpenBody):
    type: Literal["auto", "any", "tool", "none"] = Field(description="auto, any, tool or none")
    name: str | None = Field(default=None, description="the name of one of the tools")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true or false")


class OutputFormat(OpenBody):
    type: Literal["json_schema"] = Field(description="json_schema")
    schema_: Schema = Field(alias="schema")


class OutputConfig(OpenBody):
    format: OutputFormat | None = Field(default=None, description='an object: {"type": "json_schema", "schema": {...}}')
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="low, medium, high, xhigh or max"
    )


class ThinkingConfig(OpenBody):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = Field(
        default="disabled", description="enabled, adaptive, between_tools, disabled"
    )
    display: Any = None


class PromptBody(OpenBody):
    """The parts of a prompt; the whole body of `count_tokens`."""

    model: str = Field(description="the name of a served model")
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn | SystemTurn | OtherPart, ByKind("role")]], FirstWrong()
    ] = Field(min_length=1, description="a list of at least one message")
    system: str | Texts | None = Field(default=None, description="a string or a list of text blocks")
    tools: Annotated[list[Annotated[AnthropicTool | OtherPart, ByKind()]] | None, FirstWrong(), at_most(MAX_TOOLS)] = (
        TOOLS
    )
    tool_choice: ToolChosen | None = Field(default=None, description='an object such as {"type": "auto"}')
    output_config: OutputConfig | None = Field(default=None, description="an object")
    output_format: OutputFormat | None = Field(
        default=None, description='an object: {"type": "json_schema", "schema": {...}}'
    )
    thinking: ThinkingConfig | None = Field(default=None, description='an object such as {"type": "enabled"}')
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
    ignore_eos: bool | None = Field(default=None, description="true or false")

    def sampling(self) -> SamplingRequest:
        names = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "max_ttft_ms", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingRequest(
            **given,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            names={"prompt": "messages", "stop": "stop_sequences"},
        )
