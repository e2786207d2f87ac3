"""Tools in a chat: from OpenAI's parameters, and calls as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos.errors import InvalidRequest
from protos.values import FinishReason
from router.faces.conversation.tooling import AnswerReader, ReasoningDelta, Tooling, ToolUse, tooling_of
from router.faces.openai.openai_bodies import AllowedTools, ChatBody, NamedTool
from router.gateway import Gateway
from router.text.text_stream import TextDelta
from router.text.tools.calls import Part
from router.text.tools.formats import new_call_id


def chat_tooling(body: ChatBody, gateway: Gateway) -> Tooling:
    """Returns the tooling of a chat. Raises InvalidRequest for contradictions, and for tools if the model cannot call
    any."""
    choice = "none" if not body.tools else body.tool_choice or "auto"
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("'tool_choice' is only allowed with tools: give some", param="tool_choice")
    if body.structured_outputs is not None:
        return _structured(body, gateway, has_tools=choice != "none")
    schema = body.response_format.answer_schema() if body.response_format is not None else None
    return tooling_of(gateway, _use(body) if choice != "none" else None, schema, param="response_format")


def _use(body: ChatBody) -> ToolUse:
    tools, choice = body.tools or [], body.tool_choice or "auto"
    functions = [tool.function.to_function() for tool in tools]
    shown = [tool.function.shown() for tool in tools]
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        names = [choice.function.name]
        return ToolUse(shown=shown, functions=functions, choice="required", allowed=names, is_named=True)
    if isinstance(choice, AllowedTools):
        asked = choice.allowed_tools
        names = [one.function.name for one in asked.tools]
        return ToolUse(shown=shown, functions=functions, choice=asked.mode, allowed=names, parallel=parallel)
    assert choice != "none"
    return ToolUse(shown=shown, functions=functions, choice=choice, parallel=parallel)


def _structured(body: ChatBody, gateway: Gateway, *, has_tools: bool) -> Tooling:
    assert body.structured_outputs is not None
    form = body.response_format
    other = "tools" if has_tools else "response_format" if form is not None and form.type != "text" else ""
    if other:
        raise InvalidRequest(
            f"'structured_outputs' and '{other}' exclude each other: give one of them", param="structured_outputs"
        )
    grammar = body.structured_outputs.to_grammar(compact=gateway.texts.config.disable_any_whitespace)
    return Tooling(grammar=grammar, param="structured_outputs")


def calls_of(tooling: Tooling) -> Calls | None:
    """A reader of the calls in one request's answers; None if they cannot have calls."""
    return Calls(tooling) if tooling.form is not None else None


class Calls:
    """Reads text and calls of each choice's answer, by `deltas`. With `is_named` the finish reason is "stop", as with
    OpenAI, else "tool_calls"."""

    def __init__(self, tooling: Tooling) -> None:
        assert tooling.form is not None
        self._tooling = tooling
        self._form = tooling.form
        self._readers: dict[int, AnswerReader] = {}

    def deltas(self, piece: TextDelta) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas that a piece adds to its choice's message, and the choice's finish reason if it is the last."""
        if piece.index not in self._readers:
            self._readers[piece.index] = AnswerReader(self._tooling)
        reader = self._readers[piece.index]
        parts = reader.read(piece)
        ended = piece.finish_reason is FinishReason.STOP and reader.has_called and not self._tooling.is_named
        deltas = [self._delta(part) for part in parts if not isinstance(part, ReasoningDelta)]
        return deltas, "tool_calls" if ended else piece.finish_reason

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        function = {"arguments": part.arguments}
        if not part.name:
            return {"tool_calls": [{"index": part.index, "function": function}]}
        begun = {"index": part.index, "id": new_call_id(self._form), "type": "function"}
        return {"tool_calls": [begun | {"function": {"name": part.name} | function}]}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a choice add up to."""
    content, calls, thoughts = "", dict[int, dict[str, Any]](), dict[str, Any]()
    for delta in deltas:
        content += delta.pop("content", "")
        for call in delta.pop("tool_calls", ()):
            begun = calls.setdefault(call.pop("index"), call)
            if begun is not call:
                begun["function"]["arguments"] += call["function"]["arguments"]
        thoughts |= delta
    spoken = {"content": content or None, "tool_calls": list(calls.values())} if calls else {"content": content}
    return {"role": "assistant"} | spoken | thoughts | {"refusal": None}
