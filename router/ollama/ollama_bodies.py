"""The bodies of requests. Fields and options that are not listed are accepted: most are about running Ollama itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from protos.errors import InvalidRequest
from router.conversation.schema_parts import STRING, TOOLS, Objects, function_schema, tools_list
from router.conversation.tooling import AnswerSchema
from router.http.body_validation import Body, FirstWrong, Schema, at_most, ranged
from router.http.harmless import Harmless, never, one_of
from router.text.sampling_request import MAX_STOP_CHARS, MAX_STOPS, SamplingRequest

_CALLED = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": STRING, "arguments": {"type": "object"}},
        }
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null"]},
        "thinking": {"type": ["string", "null"]},
        "tool_name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": _CALLED},
        "images": {"type": ["array", "null"], "maxItems": 0},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": function_schema("parameters")},
}

Texts = Annotated[list[str], FirstWrong()]
_NO_IMAGES = one_of([], why="this model reads text only")


class OllamaOptions(Body):
    """Options that a model's answer depends on."""

    model_config = ConfigDict(extra="allow", strict=True)

    temperature: float | None = ranged("temperature", "a number")
    top_p: float | None = ranged("top_p", "a number")
    top_k: int | None = ranged("top_k", "an integer")
    min_p: float | None = ranged("min_p", "a number")
    repeat_penalty: float | None = ranged("repetition_penalty", "a number")
    presence_penalty: float | None = ranged("presence_penalty", "a number")
    frequency_penalty: float | None = ranged("frequency_penalty", "a number")
    seed: int | None = ranged("seed", "an integer")
    num_predict: int | None = Field(
        default=None,
        ge=-2,
        le=2**31 - 1,
        description="a number of tokens, or -1 or -2 for all that the context has room for",
        json_schema_extra={
            "anyOf": [{"enum": [-1, -2, None]}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}]
        },
    )
    stop: Annotated[str | Texts | None, at_most(MAX_STOPS)] = Field(
        default=None,
        description=f"a string or a list of at most {MAX_STOPS} strings",
        json_schema_extra={
            "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            "minLength": 1, "maxLength": MAX_STOP_CHARS,
        },
    )  # fmt: skip

    def sampling(self) -> dict[str, Any]:
        """The options as fields of `SamplingRequest`."""
        same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        if given.get("seed") == -1:
            del given["seed"]
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.num_predict not in (None, -1, -2):
            given["max_tokens"] = self.num_predict
        stop = () if self.stop is None else self.stop
        return given | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}


_NAMES = {name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")} | {
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "max_tokens": "options.num_predict",
}


class OllamaBody(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(description="the name of a served model")
    format: Literal["json", ""] | Schema | None = Field(default=None, description="json or a JSON Schema")
    options: OllamaOptions | None = Field(default=None, description="an object")
    stream: bool | None = Field(default=None, description="true or false")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="true, false, low, medium or high"
    )

    def answer_schema(self) -> AnswerSchema | None:
        if not isinstance(self.format, dict):
            return AnswerSchema(schema={"type": "object"}) if self.format else None
        return AnswerSchema(schema=self.format)

    def sampling(self, prompt: str) -> SamplingRequest:
        """`prompt` is the parameter with the prompt."""
        if self.options is not None and self.options.num_predict == 0:
            problem = "'options.num_predict' has the value 0: it must be at least 1, or -1 for no limit"
            raise InvalidRequest(problem, param="options.num_predict")
        given = self.options.sampling() if self.options is not None else {}
        return SamplingRequest(**given, names=_NAMES | {"prompt": prompt})


class OllamaChatBody(OllamaBody):
    messages: Annotated[Objects, WithJsonSchema({"type": "array", "items": _MESSAGE})] = Field(
        default=[], description="a list of messages"
    )
    tools: Annotated[Objects | None, *tools_list(_TOOL)] = TOOLS


class OllamaGenerateBody(OllamaBody):
    harmless: ClassVar[Mapping[str, Harmless]] = {
        "images": _NO_IMAGES,
        "suffix": one_of("", why="the models that are served continue texts, they fill no gaps"),
        "template": never("the model's own is used; with raw = true the prompt is taken as it is"),
    }

    prompt: str = Field(default="", description="a string")
    system: str | None = Field(default=None, description="a string")
    raw: bool | None = Field(default=None, description="true or false")


class OllamaShowBody(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(description="the name of a served model")

    @classmethod
    def prepare(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Older clients send the model's name as `name`."""
        return {"model": found["name"], **found} if "name" in found else dict(found)
