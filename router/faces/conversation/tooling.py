"""Tools in a conversation: what the model is shown, what its answer must be, and the calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from protos.codec import Value
from protos.errors import InvalidRequest
from protos.hints import listed
from router.gateway import Gateway
from router.http.body import MAX_DEPTH, OpenBody, Schema, read_json
from router.text.grammar.structure import inline_json, json_grammar
from router.text.text_stream import TextDelta
from router.text.tools.calls import CallDelta, Function, Part
from router.text.tools.formats import ToolFormat
from router.text.tools.grammar import calls_grammar, has_grammar

MAX_TOOLS = 512
TOOLS: Any = Field(default=None, max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} tools")


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("arguments have names")
    return schema


Parameters = Annotated[Schema, AfterValidator(_of_object)]


def parameters_field(default: Any = None, **more: Any) -> Any:
    return Field(
        default=default,
        description=f"a JSON Schema whose type is object, nested at most {MAX_DEPTH} deep",
        json_schema_extra={"properties": {"type": {"const": "object"}}},
        **more,
    )


class FunctionSpec(OpenBody):
    name: str = Field(
        pattern=r"^[a-zA-Z0-9_.-]{1,128}$", description="1 to 128 letters, digits, underscores, dots and dashes"
    )
    description: str | None = Field(default=None, description="a string")
    parameters: Parameters | None = parameters_field()
    strict: bool | None = Field(default=None, description="true or false")

    def to_function(self) -> Function:
        return Function(name=self.name, parameters=self.parameters, strict=bool(self.strict))

    def shown(self) -> dict[str, Any]:
        """The tool in the form of chat templates, which is OpenAI's."""
        fields = {name: getattr(self, name) for name in FunctionSpec.model_fields}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


class AnswerSchema(Value, frozen=True, kw_only=True):
    """The JSON Schema that an answer must fit. `lenient`: keywords that cannot be enforced are passed over."""

    schema: Mapping[str, Any]
    lenient: bool = False

    def grammar(self, *, compact: bool) -> str:
        """Raises InvalidRequest."""
        return json_grammar(self.schema, lenient=self.lenient, compact=compact)

    def rule(self, *, compact: bool) -> str:
        """The same, as a rule's right side."""
        return inline_json(self.schema, lenient=self.lenient, compact=compact)


class ToolUse(Value, frozen=True, kw_only=True):
    """A request's tools, at least one. `shown` is for chat templates; `allowed` names those that may be called (None:
    all). `is_named`: the answer is one call of the only allowed function."""

    shown: Sequence[dict[str, Any]]
    functions: Sequence[Function]
    choice: Literal["auto", "required"] = "auto"
    allowed: Sequence[str] | None = None
    is_named: bool = False
    parallel: bool = True


class Tooling(Value, frozen=True, kw_only=True):
    """`grammar` is what the answer must be ("": free), `param` the parameter that decided it, `token_grammar` the
    same for workers. Calls are read in the `form`; `required`: the answer is nothing else."""

    shown: Sequence[dict[str, Any]] = ()
    functions: Sequence[Function] = ()
    form: ToolFormat | None = None
    grammar: str = ""
    token_grammar: str = ""
    param: str = "response_format"
    is_named: bool = False
    required: bool = False


def tooling_of(gateway: Gateway, use: ToolUse | None, schema: AnswerSchema | None, *, param: str) -> Tooling:
    """Returns the tooling. `param` is the parameter of the `schema`. Raises InvalidRequest for tools that contradict
    each other or that the model cannot call."""
    compact = gateway.texts.config.disable_any_whitespace
    if use is None:
        return Tooling(grammar=schema.grammar(compact=compact) if schema is not None else "", param=param)
    functions, named = use.functions, use.allowed
    if len({one.name for one in functions}) != len(functions):
        raise InvalidRequest("'tools' has two functions of one name: give each its own", param="tools")
    form = _form(gateway)
    parallel = use.parallel and not use.is_named
    if named is not None:
        functions = [_named(functions, name) for name in named]
    decides, instead = "tools", schema.rule(compact=compact) if schema is not None else ""
    free = not instead and use.choice != "required"
    if use.choice != "required" and instead:
        decides = param
    elif use.choice != "required" and not any(one.strict for one in functions):
        if named is None and parallel:
            return Tooling(shown=use.shown, functions=use.functions, form=form, is_named=use.is_named)
        functions = [
            Function(name=one.name, parameters={"type": "object"}) for one in functions
        ]  # arguments are free; only the call's function is bound
    if not has_grammar(form):
        raise InvalidRequest(
            f"Calls in the format {form} cannot be bound: leave 'tool_choice', 'parallel_tool_calls', 'strict' and "
            f"'{param}' out of a request with tools",
            param="tools",
        )
    bound = partial(
        calls_grammar,
        form,
        functions,
        parallel=parallel,
        instead=instead if use.choice != "required" else "",
        free=free,
    )
    return Tooling(
        shown=use.shown,
        functions=use.functions,
        form=form,
        grammar=bound(),
        token_grammar=bound(tokens=gateway.texts.tool_tokens) if gateway.texts.tool_tokens else "",
        param=decides,
        is_named=use.is_named,
        required=use.choice == "required",
    )


def check_callable(functions: Sequence[Function], given: Sequence[object] | None, choice: str) -> None:
    """Raises InvalidRequest where calls are required and no function can be called."""
    if functions:
        return
    problem = "and no tool is a function that the client runs" if given else "and there are no tools"
    raise InvalidRequest(
        f"'tool_choice' is {choice} {problem}: give a function, or choose auto or none", param="tool_choice"
    )


def _form(gateway: Gateway) -> ToolFormat:
    gateway.texts.check_tools()
    if gateway.texts.tool_format is None:
        raise InvalidRequest(
            f"The chat template of the model '{gateway.card.name}' does not show how it calls tools: "
            "start the server with --tool-parser",
            param="tools",
        )
    return gateway.texts.tool_format


def _named(functions: Sequence[Function], name: str) -> Function:
    found = next((one for one in functions if one.name == name), None)
    if found is None:
        raise InvalidRequest(
            f"'tool_choice' names the function '{name[:100]}': the tools are {listed([one.name for one in functions])}",
            param="tool_choice",
        )
    return found


class ReasoningDelta(Value, frozen=True, kw_only=True):
    text: str


AnswerPart = Part | ReasoningDelta


class AnswerReader:
    """Divides one choice's answer into reasoning, text and calls, in order."""

    def __init__(self, tooling: Tooling) -> None:
        self._has_tools = tooling.form is not None
        self._required = tooling.required
        self.has_called = False

    def read(self, piece: TextDelta) -> list[AnswerPart]:
        """The parts that a piece adds, neighbouring parts of the same text or call joined."""
        parts: Sequence[Part] = piece.parts if self._has_tools else [piece.text]
        if self._required:  # a call cut off before its complete name
            parts = [part for part in parts if isinstance(part, CallDelta)]
        self.has_called = self.has_called or any(isinstance(part, CallDelta) for part in parts)
        thoughts: list[AnswerPart] = [ReasoningDelta(text=piece.reasoning)] if piece.reasoning else []
        return [*thoughts, *_merged(parts)]


def _merged(parts: Sequence[Part]) -> list[AnswerPart]:
    merged: list[AnswerPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        elif isinstance(part, CallDelta) and isinstance(last, CallDelta) and not part.name and last.index == part.index:
            merged[-1] = CallDelta(index=last.index, name=last.name, arguments=last.arguments + part.arguments)
        elif part:
            merged.append(part)
    return merged


def call_input(written: str) -> dict[str, Any]:
    """A call's arguments; what the model wrote that is no object is under `arguments`."""
    try:
        found = read_json(written or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": written}
