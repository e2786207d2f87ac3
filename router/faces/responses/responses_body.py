"""The body of a request, the items of its input among it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from protos.errors import InvalidRequest
from router.faces.conversation.tooling import MAX_TOOLS, TOOLS, FunctionSpec
from router.http.body import ByKind, FirstWrong, Harmless, OpenBody, OtherPart, Schema, at_most, never, one_of, ranged
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


class InputText(OpenBody):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str = Field(description="a string")


class Refusal(OpenBody):
    type: Literal["refusal"]
    refusal: str = Field(description="a string")


Parts = Annotated[list[Annotated[InputText | Refusal | OtherPart, ByKind()]], FirstWrong()]


class MessageItem(OpenBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(description="user, assistant, system, developer")
    content: str | Parts = Field(description="a list of objects")


class FunctionCallItem(OpenBody):
    type: Literal["function_call"]
    call_id: str = Field(description="a string")
    name: str = Field(description="a string")
    arguments: str = Field(description="a string")


class FunctionOutputItem(OpenBody):
    type: Literal["function_call_output"]
    call_id: str = Field(description="a string")
    output: str | Parts = Field(description="a list of objects")


class ReasoningItem(OpenBody):
    type: Literal["reasoning"]
    content: Parts | None = Field(default=None, description="a list of objects")


Items = Annotated[
    list[
        Annotated[
            MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | OtherPart, ByKind(default="message")
        ]
    ],
    FirstWrong(),
]


class ResponseTool(FunctionSpec):
    type: Literal["function"]


class ToolByName(OpenBody):
    type: Literal["function"]
    name: str = Field(description="a string")


class ToolsByName(OpenBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(default="auto", description="auto or required")
    tools: list[Annotated[ToolByName | OtherPart, ByKind()]] = Field(description="a list of objects")


ResponsesToolChoice = (
    Literal["none", "auto", "required"] | Annotated[ToolByName | ToolsByName | OtherPart, ByKind()] | None
)


class TextFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    name: str | None = Field(default=None, description="a string")
    description: str | None = Field(default=None, description="a string")
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="true or false")


class AnswerTextConfig(OpenBody):
    format: TextFormat | None = Field(default=None, description='an object such as {"type": "text"}')


class ReasoningConfig(OpenBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="none, minimal, low, medium, high, xhigh or max"
    )


def _described(schema: dict[str, Any]) -> None:
    schema["properties"] |= {name: dict(one.schema) for name, one in REFUSALS.items()}


class InputBody(OpenBody):
    """The parts of a prompt; the whole body of `input_tokens`."""

    model_config = ConfigDict(json_schema_extra=_described)
    harmless: ClassVar[Mapping[str, Harmless]] = REFUSALS

    model: str = Field(description="the name of a served model")
    input: str | Items = Field(description="a string or a list of at least one item", json_schema_extra={"minItems": 1})
    instructions: str | None = Field(default=None, description="a string")
    tools: Annotated[list[Annotated[ResponseTool | OtherPart, ByKind()]] | None, FirstWrong(), at_most(MAX_TOOLS)] = (
        TOOLS
    )
    tool_choice: ResponsesToolChoice = Field(
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
    ignore_eos: bool | None = Field(default=None, description="true or false")

    def sampling(self) -> SamplingRequest:
        own = ("seed", "priority", "cache_salt", "max_ttft_ms", "ignore_eos")
        names = ("temperature", "top_p", "top_k", "min_p", *own)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingRequest(
            **given,
            max_tokens=self.max_output_tokens,
            names={"prompt": "input", "max_tokens": "max_output_tokens"},
        )
