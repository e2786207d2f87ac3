"""Items of an input to the messages that chat templates read, and its tools: the same as a chat's would be.

reasoning ┐
message   ├─ one turn of the assistant           function_call_output ── a turn of the tool
function_call ... ┘
"""

from __future__ import annotations

import re
from typing import Any

from protos.errors import InvalidRequest, UnsupportedParameter
from router.faces.conversation.parts import Ignored, listed_tools, missing, not_text, placed, text_part, wrong
from router.faces.conversation.tooling import AnswerSchema, Tooling, ToolUse, check_callable, tooling_of
from router.faces.responses.responses_body import (
    FunctionCallItem,
    FunctionOutputItem,
    InputBody,
    InputText,
    MessageItem,
    Parts,
    ReasoningItem,
    Refusal,
    ResponsesToolChoice,
    TextFormat,
    ToolByName,
    ToolsByName,
)
from router.gateway import Gateway
from router.http.body import OtherPart, read_json

_KIND = re.compile(r"[a-z_0-9]{1,64}", re.ASCII)

Template = dict[str, Any]


def conversation_of(body: InputBody, ignored: Ignored) -> list[Template]:
    """Raises InvalidRequest."""
    messages: list[Template] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thoughts: list[str] = []
    for where, item in placed(body.input, "input"):
        match item:
            case ReasoningItem():
                thoughts += _texts(item.content or [], f"{where}.content")
                continue
            case FunctionCallItem():
                _assistant(messages, thoughts).setdefault("tool_calls", []).append(_call(item))
            case FunctionOutputItem():
                output = _content(item.output, f"{where}.output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            case MessageItem():
                message: Template = {"role": item.role, "content": _content(item.content, f"{where}.content")}
                if item.role == "assistant" and thoughts:
                    message["reasoning_content"] = "".join(thoughts)
                messages.append(message)
            case OtherPart(type="item_reference"):
                problem = f"'{where}' is an item_reference: nothing is stored here, send the item itself"
                raise UnsupportedParameter(problem, param=where)
            case OtherPart(type=str(kind)) if _KIND.fullmatch(kind):
                ignored.add(f"{where}: {kind}")
                continue
            case OtherPart():
                raise wrong(f"{where}.type", item.type, "message, function_call, function_call_output or reasoning")
        thoughts = []
    if not messages:
        raise InvalidRequest("'input' has no item that a model reads: give it a message", param="input")
    return messages


def _assistant(messages: list[Template], thoughts: list[str]) -> Template:
    """Returns the assistant's turn of a call, with the reasoning before the call."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if thoughts:
        turn["reasoning_content"] = "".join([turn.get("reasoning_content", ""), *thoughts])
    return turn


def _call(item: FunctionCallItem) -> Template:
    """A call with its arguments as an object, or as the model's text if it is none."""
    try:
        arguments = read_json(item.arguments or "{}")
    except ValueError:
        arguments = None
    function = {"name": item.name, "arguments": arguments if isinstance(arguments, dict) else item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _content(content: str | Parts, where: str) -> str | list[Template]:
    return content if isinstance(content, str) else ([text_part(text) for text in _texts(content, where)] or "")


def _texts(content: Parts, where: str) -> list[str]:
    texts = []
    for place, part in placed(content, where):
        match part:
            case Refusal():
                texts.append(part.refusal)
            case InputText():
                texts.append(part.text)
            case OtherPart(type="input_image" | "input_file" | "input_audio" | "input_video"):
                raise not_text(place, part.type)
            case OtherPart():
                raise wrong(f"{place}.type", part.type, "input_text or output_text")
    return texts


def responses_tooling(body: InputBody, gateway: Gateway, ignored: Ignored) -> Tooling:
    """Tools that are no functions are skipped. Raises InvalidRequest."""
    tools = listed_tools(body.tools, ignored)
    functions = [tool.to_function() for tool in tools]
    choice, allowed, is_named = _choice(body.tool_choice, ignored)
    callable_ones = functions if allowed != [] else []  # []: all allowed tools are skipped ones
    if choice == "required" or allowed:
        check_callable(callable_ones, body.tools, "required" if choice == "required" else "allowed_tools")
    use = None
    if callable_ones and choice != "none":
        use = ToolUse(
            shown=[tool.shown() for tool in tools],
            functions=functions,
            choice="required" if choice == "required" else "auto",
            allowed=allowed,
            is_named=is_named,
            parallel=body.parallel_tool_calls is not False,
        )
    form = body.text.format if body.text is not None else None
    return tooling_of(gateway, use, _schema(form), param="text.format")


def _choice(choice: ResponsesToolChoice, ignored: Ignored) -> tuple[str, list[str] | None, bool]:
    """Whether tools are called, the names of the allowed ones, and whether the request names one function."""
    match choice:
        case ToolByName():
            return "required", [choice.name], True
        case ToolsByName():
            return choice.mode, [tool.name for tool in choice.tools if isinstance(tool, ToolByName)], False
        case OtherPart(type=str()):
            ignored.add("tool_choice")
            return "auto", None, False
        case OtherPart():
            raise wrong("tool_choice.type", choice.type, "function or allowed_tools")
    return choice or "auto", None, False


def _schema(form: TextFormat | None) -> AnswerSchema | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return AnswerSchema(schema={"type": "object"})
    if form.schema_ is None:
        raise missing("text.format.schema")
    return AnswerSchema(schema=form.schema_, lenient=form.strict is False)
