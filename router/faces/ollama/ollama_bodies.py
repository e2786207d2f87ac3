"""The bodies of requests. Fields and options that are not listed are accepted: most are about running Ollama itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from protos.errors import InvalidRequest
from router.faces.conversation.tooling import MAX_TOOLS, TOOLS, AnswerSchema, FunctionSpec
from router.http.body import FirstWrong, Harmless, OpenBody, Schema, at_most, never, one_of, ranged
from router.text.sampling_request import MAX_STOP_CHARS, MAX_STOPS, SamplingRequest


class CalledTool(OpenBody):
    name: str = Field(description="a string")
    arguments: dict[str, Any] = Field(description="an object")


class OllamaCall(OpenBody):
    function: CalledTool = Field(description="an object")


class OllamaMessage(OpenBody):
    role: Literal["system", "user", "assistant", "tool"] = Field(description="system, user, assistant, tool")
    content: str | None = Field(default=None, description="a string")
    thinking: str | None = Field(default=None, description="a string")
    tool_name: str | None = Field(default=None, description="a string")
    tool_calls: Annotated[list[OllamaCall] | None, FirstWrong()] = Field(default=None, description="a list of objects")
    images: list[Any] | None = Field(
        default=None,
        description="a list without images: this model reads text only",
        json_schema_extra={"maxItems": 0},
    )


class OllamaTool(OpenBody):
    type: Literal["function"] = Field(description="function")
    function: FunctionSpec = Field(description="an object")


Texts = Annotated[list[str], FirstWrong()]
_NO_IMAGES = one_of([], why="this model reads text only")


class OllamaOptions(OpenBody):
    """Options that a model's answer depends on."""

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


class OllamaBody(OpenBody):
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
    messages: Annotated[list[OllamaMessage], FirstWrong()] = Field(default=[], description="a list of messages")
    tools: Annotated[list[OllamaTool] | None, FirstWrong(), at_most(MAX_TOOLS)] = TOOLS


class OllamaGenerateBody(OllamaBody):
    harmless: ClassVar[Mapping[str, Harmless]] = {
        "images": _NO_IMAGES,
        "suffix": one_of("", why="the models that are served continue texts, they fill no gaps"),
        "template": never("the model's own is used; with raw = true the prompt is taken as it is"),
    }

    prompt: str = Field(default="", description="a string")
    system: str | None = Field(default=None, description="a string")
    raw: bool | None = Field(default=None, description="true or false")


class OllamaShowBody(OpenBody):
    model: str = Field(description="the name of a served model")

    @classmethod
    def prepare(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Older clients send the model's name as `name`."""
        return {"model": found["name"], **found} if "name" in found else dict(found)
