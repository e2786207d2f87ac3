"""The bodies of requests.

Types are checked here; ranges, which gRPC shares, in `router.text.sampling_request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from protos.errors import InvalidRequest
from router.faces.conversation.speculating import PredictionBody, SpeculationBody
from router.faces.conversation.tooling import MAX_TOOLS, TOOLS, FunctionSpec
from router.faces.openai.structured import JsonSchema, ResponseFormat, StructuredOutputs
from router.faces.openai.unsupported_params import (
    CHAT_REFUSALS,
    COMPLETION_REFUSALS,
    MESSAGE_REFUSALS,
    OF_VLLM,
)
from router.http.body import Body, FirstWrong, Harmless, at_most, field_of, ranged, read_json, without_harmless
from router.text.model_card import RANGES
from router.text.sampling_request import MAX_BIASES, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, SamplingRequest

MAX_CALLS = 128  # names in one message

CacheControl = dict[str, Any] | None
CACHED: Any = Field(default=None, exclude=True, description="an object: all is cached")
_FUNCTION = '"function": no other kind of tool is offered'


class ChatFunction(FunctionSpec):
    model_config = ConfigDict(extra="forbid")

    cache_control: CacheControl = CACHED


class ToolSpec(Body):
    type: Literal["function"] = Field(description=_FUNCTION)
    function: ChatFunction = Field(description="an object with the function's name and parameters")
    cache_control: CacheControl = CACHED


class NamedFunction(Body):
    name: str = Field(description="the name of a function among the tools")


class NamedTool(Body):
    type: Literal["function"] = Field(description=_FUNCTION)
    function: NamedFunction = Field(description="an object with the function's name")


class Allowance(Body):
    mode: Literal["auto", "required"] = Field(description="auto or required")
    tools: Annotated[list[NamedTool], FirstWrong(), at_most(MAX_TOOLS)] = Field(
        min_length=1, max_length=MAX_TOOLS, description=f"a list of 1 to {MAX_TOOLS} of the tools, by name"
    )


class AllowedTools(Body):
    type: Literal["allowed_tools"] = Field(description='"allowed_tools"')
    allowed_tools: Allowance = Field(description="an object with mode and tools")


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools
TOOL_CHOICES = (
    'none, auto, required or an object such as {"type": "function", "function": {"name": "f"}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
)


class CalledFunction(Body):
    name: str = Field(description="a string")
    arguments: str = Field(description="a string")


class ToolCall(Body):
    id: str = Field(description="a string")
    type: Literal["function"] = Field(description=_FUNCTION)
    function: CalledFunction = Field(description="an object with name and arguments")
    index: int | None = Field(default=None, description="an integer")

    def to_template(self) -> dict[str, Any]:
        """A call in the form of chat templates: arguments are an object, or the original text if the model wrote no
        object."""
        try:
            arguments = read_json(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


MAX_OPTIONS = 64  # names in a chat template


def _described(refusals: Mapping[str, Harmless]) -> ConfigDict:
    """Adds parameters that are accepted without effect to a body's JSON Schema."""

    def add(schema: dict[str, Any]) -> None:
        schema["properties"] |= {name: dict(one.schema) for name, one in refusals.items() if name not in OF_VLLM}

    return ConfigDict(json_schema_extra=add)


Ids = Annotated[list[int], FirstWrong()]
Texts = Annotated[list[str], FirstWrong()]
IdLists = Annotated[list[Ids], FirstWrong()]


def _false(value: Any) -> Any:
    """Refuses 0, which pydantic's Literal takes for False."""
    if value is not None and value is not False:
        raise ValueError("not false")
    return value


class StreamOptions(Body):
    include_usage: bool | None = Field(default=None, description="true or false")
    include_obfuscation: Annotated[Literal[False] | None, BeforeValidator(_false)] = Field(
        default=None, description="false: nothing is obfuscated"
    )
    include_prefill_progress: bool | None = Field(
        default=None, description="true or false: chunks that say how far the prompt is read"
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="true or false: every chunk has the usage up to there"
    )


_STOP: dict[str, Any] = {"minLength": 1, "maxLength": MAX_STOP_CHARS}


class SamplingBody(Body):
    """Parameters of both chat and completions; the last block is vLLM's."""

    id_lists: ClassVar[tuple[str, ...]] = ("prompt", "stop_token_ids")

    @classmethod
    def hint(cls, name: str, known: type[Body]) -> str:
        if (form := name.removeprefix("guided_")) in StructuredOutputs.forms():
            return f" It is 'structured_outputs' now: {{\"{form}\": ...}}."
        if name == "structural_tag":
            return ' It is not offered: tools with "strict": true bind calls, and a grammar can have such tags.'
        if name == "disable_any_whitespace":
            instead = " instead of 'response_format'" if known in (ResponseFormat, JsonSchema) else ""
            return f' It belongs in \'structured_outputs\': {{"json": {{...}}, "{name}": true}}{instead}.'
        if known is ResponseFormat and field_of(JsonSchema, name):
            return f' It belongs in \'response_format.json_schema\': {{"name": ..., "{name}": ...}}.'
        if name == "response_format" and cls is CompletionBody:
            return " Completions take 'structured_outputs': {\"json\": ...}."
        return ""

    model: str = Field(description="the name of a served model")
    n: int | None = ranged("n", "an integer")
    stream: bool | None = Field(default=None, description="true or false")
    stream_options: StreamOptions | None = Field(default=None, description='an object such as {"include_usage": true}')
    temperature: float | None = ranged("temperature", "a number")
    top_p: float | None = ranged("top_p", "a number")
    presence_penalty: float | None = ranged("presence_penalty", "a number")
    frequency_penalty: float | None = ranged("frequency_penalty", "a number")
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASES)] = Field(
        default=None,
        description=f"an object from at most {MAX_BIASES} token ids to numbers",
        json_schema_extra={
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"minimum": -100, "maximum": 100},
        },
    )
    seed: int | None = ranged("seed", "an integer")
    stop: Annotated[str | Texts | None, at_most(MAX_STOPS)] = Field(
        default=None,
        description=f"a string or a list of at most {MAX_STOPS} strings",
        json_schema_extra={"maxItems": MAX_STOPS, "items": dict(_STOP), **_STOP},
    )
    max_tokens: int | None = ranged("max_tokens", "an integer")

    top_k: int | None = ranged("top_k", "an integer")
    min_p: float | None = ranged("min_p", "a number")
    repetition_penalty: float | None = ranged("repetition_penalty", "a number")
    min_tokens: int | None = ranged("min_tokens", "an integer, at most max_tokens,")
    stop_token_ids: Annotated[Ids | None, at_most(MAX_STOP_TOKENS)] = Field(
        default=None,
        description=f"a list of at most {MAX_STOP_TOKENS} token ids",
        json_schema_extra={"maxItems": MAX_STOP_TOKENS},
    )
    ignore_eos: bool | None = Field(default=None, description="true or false")
    skip_special_tokens: bool | None = Field(default=None, description="true or false")
    include_stop_str_in_output: bool | None = Field(default=None, description="true or false")
    prompt_logprobs: int | None = ranged("prompt_logprobs", "an integer")
    return_token_ids: bool | None = Field(default=None, description="true or false")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256, description="1 to 256 characters")
    prompt_cache_key: str | None = Field(default=None, max_length=256, description="up to 256 characters")
    priority: int | None = ranged("priority", "an integer")
    max_ttft_ms: float | None = ranged("max_ttft_ms", "a number of milliseconds")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="an object with one of json, regex, choice, grammar and json_object"
    )
    speculation: SpeculationBody | None = Field(
        default=None, description='an object such as {"enabled": false} or {"sources": ["ngram"]}'
    )
    prediction: PredictionBody | None = Field(
        default=None, description='an object such as {"type": "content", "content": "..."}'
    )

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingRequest` with the same names in both APIs. A field that is absent or null has its
        default."""
        given = {name: value for name in _ASKED if (value := getattr(self, name)) is not None}
        stop = () if self.stop is None else self.stop
        return given | {
            "tells_progress": bool(self.stream_options and self.stream_options.include_prefill_progress),
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": _token_biases(self.logit_bias or {}),
        }

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' is only allowed with stream = true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("'prompt_logprobs' is only given with stream = false", param="prompt_logprobs")


# max_tokens has two names and a range of its own in each API, so the APIs put it in themselves.
_ASKED = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
    "prompt_logprobs", "cache_salt", "priority", "max_ttft_ms",
)  # fmt: skip


class TextPart(Body):
    type: Literal["text"] = Field(description='"text": this model reads no images, audio or files')
    text: str = Field(description="a string")
    cache_control: CacheControl = CACHED


Content = str | Annotated[list[TextPart], FirstWrong()]


def _prepared(found: Mapping[str, Any], harmless: Mapping[str, Harmless]) -> dict[str, Any]:
    kept = without_harmless(found, harmless)
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [
            without_harmless(one, MESSAGE_REFUSALS, where=f"messages[{i}].") if isinstance(one, dict) else one
            for i, one in enumerate(messages)
        ]
    return kept


class ChatMessage(Body):
    model_config = _described(MESSAGE_REFUSALS)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="system, developer, user, assistant or tool"
    )
    content: Content | None = Field(default=None, description="a string or a list of text parts")
    name: str | None = Field(default=None, description="a string")
    reasoning_content: str | None = Field(default=None, description="a string")
    reasoning: str | None = Field(default=None, description="a string, as reasoning_content")
    tool_call_id: str | None = Field(default=None, description="a string")
    tool_calls: Annotated[list[ToolCall] | None, FirstWrong(), at_most(MAX_CALLS)] = Field(
        default=None, description=f"a list of at most {MAX_CALLS} calls of an assistant", max_length=MAX_CALLS
    )

    def check(self, where: str) -> None:
        """Checks the part of the request at `where`. Raises InvalidRequest."""
        if self.tool_calls and self.role != "assistant":
            param = f"{where}.tool_calls"
            raise InvalidRequest(f"'{param}' is only allowed in an assistant's message: leave it out", param=param)
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"Missing required parameter: '{where}.content'.", param=f"{where}.content")

    def to_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning"})
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message


class ChatBody(SamplingBody):
    model_config = _described(CHAT_REFUSALS)
    harmless: ClassVar[Mapping[str, Harmless]] = CHAT_REFUSALS

    messages: Annotated[list[ChatMessage], FirstWrong()] = Field(
        min_length=1, description="a list of at least one message"
    )
    max_completion_tokens: int | None = ranged("max_tokens", "an integer")
    logprobs: bool | None = Field(default=None, description="true or false")
    top_logprobs: int | None = ranged("logprobs", "an integer")

    response_format: ResponseFormat | None = Field(
        default=None, description='an object such as {"type": "json_object"}'
    )
    tools: Annotated[list[ToolSpec] | None, FirstWrong(), at_most(MAX_TOOLS)] = TOOLS
    tool_choice: ToolChoice | None = Field(default=None, description=TOOL_CHOICES)
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="none, minimal, low, medium, high, xhigh or max"
    )
    include_reasoning: bool | None = Field(default=None, description="true or false")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    continue_final_message: bool | None = Field(default=None, description="true or false")
    chat_template_kwargs: Annotated[dict[str, str | int | float | bool | None] | None, at_most(MAX_OPTIONS)] = Field(
        default=None,
        description=f"an object of at most {MAX_OPTIONS} strings, numbers and booleans",
        json_schema_extra={"maxProperties": MAX_OPTIONS},
    )

    @classmethod
    def prepare(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return _prepared(found, cls.harmless)

    def check_parts(self) -> None:
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")

    def asked(self) -> SamplingRequest:
        """Raises InvalidRequest where two parameters contradict each other."""
        self.check_stream()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            problem = f"'max_tokens' is {self.max_tokens} and 'max_completion_tokens' {self.max_completion_tokens}"
            raise InvalidRequest(f"{problem}: give one of them", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' is only allowed with logprobs = true", param="top_logprobs")
        limit, name = self.max_completion_tokens, "max_completion_tokens"
        if limit is None:
            limit, name = self.max_tokens, "max_tokens"
        return SamplingRequest(
            **self.sampling(),
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            names={"prompt": "messages", "max_tokens": name, "logprobs": "top_logprobs"},
        )


class CompletionBody(SamplingBody):
    model_config = _described(COMPLETION_REFUSALS)
    harmless: ClassVar[Mapping[str, Harmless]] = COMPLETION_REFUSALS

    max_tokens: int | None = Field(
        default=None,
        description=f"an integer between 1 and {RANGES['max_tokens'][1]}, or 0 with echo",
        json_schema_extra={"minimum": 0, "maximum": RANGES["max_tokens"][1]},
    )
    prompt: str | Texts | Ids | IdLists = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of token ids"
    )
    best_of: int | None = ranged("n", "an integer, at least n,")
    echo: bool | None = Field(default=None, description="true or false")
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    split_special_tokens: bool | None = Field(default=None, description="true or false")
    logprobs: int | None = ranged("logprobs", "an integer")

    def asked(self) -> SamplingRequest:
        """Raises InvalidRequest where two parameters contradict each other."""
        self.check_stream()
        num_given = 1 if self.n is None else self.n
        num_made = num_given if self.best_of is None else self.best_of
        if num_made < num_given:
            problem = f"'best_of' is {num_made} and n {num_given}"
            raise InvalidRequest(f"{problem}: n answers are chosen from it, so it must be at least n", param="best_of")
        if num_made > num_given and self.stream:
            raise InvalidRequest("'best_of' beyond n is only allowed with stream = false", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("'max_tokens' is 0: it must be at least 1, or 0 with echo = true", param="max_tokens")
        is_silent = self.max_tokens == 0
        sampling = self.sampling()
        if self.echo and self.logprobs is not None:
            sampling["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        logprobs = 0 if self.logprobs is None and num_made > num_given else self.logprobs
        names = {} if self.best_of is None else {"n": "best_of"}
        return SamplingRequest(
            **sampling | {"n": num_made},
            max_tokens=None if is_silent else self.max_tokens,
            silent=is_silent,
            logprobs=logprobs,
            names=names,
        )


class TokenizeBody(Body):
    """Either `prompt` or `messages`."""

    model: str | None = Field(default=None, description="the name of a served model")
    prompt: str | None = Field(default=None, description="a string")
    messages: Annotated[list[ChatMessage], FirstWrong()] | None = Field(
        default=None, min_length=1, description="a list of messages"
    )
    tools: Annotated[list[ToolSpec] | None, FirstWrong(), at_most(MAX_TOOLS)] = TOOLS
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    split_special_tokens: bool | None = Field(default=None, description="true or false")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    return_token_strs: bool | None = Field(default=None, description="true or false")

    @classmethod
    def prepare(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return _prepared(found, {})

    def check_parts(self) -> None:
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")


class DetokenizeBody(Body):
    id_lists: ClassVar[tuple[str, ...]] = ("tokens",)
    model: str | None = Field(default=None, description="the name of a served model")
    tokens: Ids = Field(description="a list of token ids")


def _token_biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise InvalidRequest(f"'logit_bias' has the key {key[:60]!r}: keys are token ids", param="logit_bias")
        if int(key) in biases:
            problem = f"'logit_bias' has the token id {int(key)} twice, once as {key!r}"
            raise InvalidRequest(f"{problem}: give each token id once", param="logit_bias")
        biases[int(key)] = bias
    return tuple(biases.items())
