"""Tools in a chat: what the model is shown, what its answer must be, and its calls as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos.errors import InvalidRequest
from protos.hints import listed
from protos.value import Value
from protos.values import FinishReason
from router.gateway import Gateway
from router.openai.schema import ChatBody
from router.openai.tools import AllowedTools, NamedTool
from router.text.text_stream import TextDelta
from router.text.tool_call_formats import (
    CallDelta,
    CallReader,
    Function,
    Part,
    ToolFormat,
    calls_grammar,
    new_call_id,
    reader_of,
)


class Tooling(Value, frozen=True, kw_only=True):
    """`shown` tools go to the chat template. `grammar` is what the answer must be, "" where it is free, and `param` who
    asked for it. With a `form` calls are read from the answer."""

    shown: Sequence[dict[str, Any]] = ()
    functions: Sequence[Function] = ()
    form: ToolFormat | None = None
    grammar: str = ""
    param: str = "response_format"
    is_named: bool = False

    def answers(self) -> Calls | None:
        """A reader of one request's answers; None where they cannot have calls."""
        if self.form is None:
            return None
        return Calls(self.form, [one.name for one in self.functions], is_named=self.is_named)


def tooling_of(body: ChatBody, gateway: Gateway) -> Tooling:
    """Raises InvalidRequest for what contradicts itself, and for tools of a model that knows none."""
    choice = "none" if not body.tools else body.tool_choice or "auto"
    if not body.tools and body.tool_choice not in (None, "none"):
        raise InvalidRequest("'tool_choice' is only allowed with tools: give some", param="tool_choice")
    if body.structured_outputs is not None:
        return _structured(body, gateway, has_tools=choice != "none")
    response_format, compact = body.response_format, gateway.disable_any_whitespace
    if not body.tools or choice == "none":
        return Tooling(grammar=response_format.grammar(compact=compact) if response_format is not None else "")
    functions = [tool.to_function() for tool in body.tools]
    if len({one.name for one in functions}) != len(functions):
        raise InvalidRequest("'tools' has two functions of one name: give each its own", param="tools")
    form = _form(gateway)
    shown = [tool.model_dump(exclude_none=True) for tool in body.tools]
    is_named, is_limited = isinstance(choice, NamedTool), isinstance(choice, AllowedTools)
    parallel = body.parallel_tool_calls is not False and not is_named
    if isinstance(choice, NamedTool):
        functions, choice = [_named(functions, choice.function.name)], "required"
    elif isinstance(choice, AllowedTools):
        asked_for = choice.allowed_tools
        functions = [_named(functions, one.function.name) for one in asked_for.tools]
        choice = asked_for.mode
    grammar, param, instead = "", "tools", response_format.rule(compact=compact) if response_format is not None else ""
    if choice == "required":
        grammar = calls_grammar(form, functions, parallel=parallel)
    elif instead:
        grammar, param = calls_grammar(form, functions, parallel=parallel, instead=instead), "response_format"
    elif any(one.strict for one in functions):
        grammar = calls_grammar(form, functions, parallel=parallel, free=True)
    elif is_limited or not parallel:  # arguments are free: of each call only that it is one of these
        grammar = calls_grammar(form, [_loose(one) for one in functions], parallel=parallel, free=True)
    return Tooling(shown=shown, functions=functions, form=form, grammar=grammar, param=param, is_named=is_named)


def _loose(function: Function) -> Function:
    return Function(name=function.name, parameters={"type": "object"})


def _structured(body: ChatBody, gateway: Gateway, *, has_tools: bool) -> Tooling:
    assert body.structured_outputs is not None
    form = body.response_format
    other = "tools" if has_tools else "response_format" if form is not None and form.type != "text" else ""
    if other:
        raise InvalidRequest(
            f"'structured_outputs' and '{other}' exclude each other: give one of them", param="structured_outputs"
        )
    grammar = body.structured_outputs.to_grammar(compact=gateway.disable_any_whitespace)
    return Tooling(grammar=grammar, param="structured_outputs")


def _form(gateway: Gateway) -> ToolFormat:
    gateway.check_tools()
    if gateway.tool_format is None:
        raise InvalidRequest(
            f"How the model '{gateway.card.name}' calls tools cannot be told from its chat template: "
            "the server has to be started with --tool-parser",
            param="tools",
        )
    return gateway.tool_format


def _named(functions: Sequence[Function], name: str) -> Function:
    found = next((one for one in functions if one.name == name), None)
    if found is None:
        raise InvalidRequest(
            f"'tool_choice' names the function '{name[:100]}': the tools are {listed([one.name for one in functions])}",
            param="tool_choice",
        )
    return found


class Calls:
    """Reads the calls of each choice's answer. A choice is told by `deltas` or by one `message`. Where the function
    `is_named` by the request an answer has "stop" for its reason, as OpenAI has it, and "tool_calls" otherwise."""

    def __init__(self, form: ToolFormat, names: Sequence[str], *, is_named: bool = False) -> None:
        self._form = form
        self._is_named = is_named
        self._names = names
        self._readers: dict[int, CallReader] = {}
        self._called: set[int] = set()

    def deltas(self, piece: TextDelta) -> tuple[list[dict[str, Any]], str | None]:
        """What a piece adds to its choice's message, and the choice's finish reason if it is the last."""
        if piece.index not in self._readers:
            self._readers[piece.index] = reader_of(self._form, self._names)
        reader = self._readers[piece.index]
        parts = reader.feed(piece.text)
        if piece.finish_reason is not None:
            parts += reader.end()
        if any(isinstance(part, CallDelta) for part in parts):
            self._called.add(piece.index)
        ended = piece.finish_reason is FinishReason.STOP and piece.index in self._called and not self._is_named
        return [self._delta(part) for part in _merged(parts)], "tool_calls" if ended else piece.finish_reason

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        function = {"arguments": part.arguments}
        if not part.name:
            return {"tool_calls": [{"index": part.index, "function": function}]}
        begun = {"index": part.index, "id": new_call_id(self._form), "type": "function"}
        return {"tool_calls": [begun | {"function": {"name": part.name} | function}]}

    def message(self, whole: TextDelta) -> tuple[dict[str, Any], str | None]:
        """Content and calls of a whole answer, and its finish reason."""
        deltas, finish_reason = self.deltas(whole)
        content = "".join(delta.get("content", "") for delta in deltas)
        calls: dict[int, dict[str, Any]] = {}
        for call in (one for delta in deltas for one in delta.get("tool_calls", ())):
            index = call.pop("index")
            if index in calls:
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls[index] = call
        if not calls:
            return {"content": content}, finish_reason
        return {"content": content or None, "tool_calls": list(calls.values())}, finish_reason


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Merges neighbouring pieces of the same text or call."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        elif isinstance(part, CallDelta) and isinstance(last, CallDelta) and not part.name and last.index == part.index:
            merged[-1] = CallDelta(index=last.index, name=last.name, arguments=last.arguments + part.arguments)
        else:
            merged.append(part)
    return merged
