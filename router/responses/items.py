"""Items of an input to the messages that chat templates read, and its tools: the same as a chat's would be.

reasoning ┐
message   ├─ one turn of the assistant           function_call_output ── a turn of the tool
function_call ... ┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from protos.errors import InvalidRequest, UnsupportedParameter
from protos.hints import listed
from router.conversation.functions import function_in
from router.conversation.parts import Ignored, parts_in, text_in, text_part, wrong
from router.conversation.tooling import AnswerSchema, Tooling, ToolUse, check_callable, tooling_of
from router.gateway import Gateway
from router.http.body_validation import read_json
from router.responses.responses_body import InputBody, TextFormat

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CHOICES = ("none", "auto", "required")
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
    for where, item in parts_in(body.input, "input"):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += _texts([] if item.get("content") is None else item["content"], f"{where}.content")
            continue
        if kind == "function_call":
            _assistant(messages, thoughts).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "content": output, "tool_call_id": text_in(item, "call_id", where)})
        elif kind == "message":
            _append(messages, item, where, thoughts)
        elif kind == "item_reference":
            problem = f"'{where}' is an item_reference: nothing is stored here, send the item itself"
            raise UnsupportedParameter(problem, param=where)
        elif isinstance(kind, str) and _KIND.fullmatch(kind):
            ignored.add(f"{where}: {kind}")
            continue
        else:
            raise wrong(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")
        thoughts = []
    if not messages:
        raise InvalidRequest("'input' has no item that a model reads: give it a message", param="input")
    return messages


def _append(messages: list[Template], item: Mapping[str, Any], where: str, thoughts: list[str]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, listed(_ROLES))
    content = _content(item.get("content"), f"{where}.content")
    message: Template = {"role": role, "content": content}
    if role == "assistant" and thoughts:
        message["reasoning_content"] = "".join(thoughts)
    messages.append(message)


def _assistant(messages: list[Template], thoughts: list[str]) -> Template:
    """The assistant's turn that a call belongs to, with the reasoning before the call."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if thoughts:
        turn["reasoning_content"] = "".join([turn.get("reasoning_content", ""), *thoughts])
    return turn


def _call(item: Mapping[str, Any], where: str) -> Template:
    """With arguments as an object, or as the text that the model wrote where it is none."""
    written = text_in(item, "arguments", where)
    try:
        arguments = read_json(written or "{}")
    except ValueError:
        arguments = None
    function = {
        "name": text_in(item, "name", where),
        "arguments": arguments if isinstance(arguments, dict) else written,
    }
    return {"id": text_in(item, "call_id", where), "type": "function", "function": function}


def _content(given: Any, where: str) -> str | list[Template]:
    if given is None:
        raise InvalidRequest(f"Missing required parameter: '{where}'.", param=where)
    return given if isinstance(given, str) else ([text_part(text) for text in _texts(given, where)] or "")


def _texts(given: Any, where: str) -> list[str]:
    texts = []
    for place, part in parts_in(given, where):
        kind = part.get("type")
        if kind == "refusal":
            texts.append(text_in(part, "refusal", place))
        elif kind in _TEXTS:
            texts.append(text_in(part, "text", place))
        elif kind in ("input_image", "input_file", "input_audio", "input_video"):
            problem = f"'{place}' has the type {kind}: this model reads text only; leave it out, or give its text"
            raise UnsupportedParameter(problem, param=place)
        else:
            raise wrong(f"{place}.type", kind, "input_text or output_text")
    return texts


def responses_tooling(body: InputBody, gateway: Gateway, ignored: Ignored) -> Tooling:
    """Tools that are no functions are skipped. Raises InvalidRequest."""
    functions, shown = [], []
    for where, tool in parts_in(body.tools or [], "tools"):
        if (kind := tool.get("type")) != "function":
            if not isinstance(kind, str):
                raise wrong(f"{where}.type", kind, "a string")
            ignored.add(f"{where}: {kind}")
            continue
        function, as_shown = function_in(tool, where, schema="parameters")
        functions.append(function)
        shown.append(as_shown)
    choice, allowed, is_named = _choice(body.tool_choice, ignored)
    callable_ones = functions if allowed != [] else []  # []: what may be called are tools that are skipped
    if choice == "required" or allowed:
        check_callable(callable_ones, body.tools, "required" if choice == "required" else "allowed_tools")
    use = None
    if callable_ones and choice != "none":
        use = ToolUse(
            shown=shown,
            functions=functions,
            choice="required" if choice == "required" else "auto",
            allowed=allowed,
            is_named=is_named,
            parallel=body.parallel_tool_calls is not False,
        )
    form = body.text.format if body.text is not None else None
    return tooling_of(gateway, use, _schema(form), param="text.format")


def _choice(given: str | dict[str, Any] | None, ignored: Ignored) -> tuple[str, list[str] | None, bool]:
    """Whether tools are called, the names of those that may be, and whether it is one that the request names."""
    if given is None:
        return "auto", None, False
    if isinstance(given, str):
        if given not in _CHOICES:
            raise wrong("tool_choice", given, listed(_CHOICES))
        return given, None, False
    kind = given.get("type")
    if kind == "function":
        return "required", [text_in(given, "name", "tool_choice")], True
    if kind == "allowed_tools":
        mode = given.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise wrong("tool_choice.mode", mode, "auto or required")
        named = parts_in(given.get("tools"), "tool_choice.tools")
        return mode, [text_in(one, "name", where) for where, one in named if one.get("type") == "function"], False
    if not isinstance(kind, str):
        raise wrong("tool_choice.type", kind, "function or allowed_tools")
    ignored.add("tool_choice")
    return "auto", None, False


def _schema(form: TextFormat | None) -> AnswerSchema | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return AnswerSchema(schema={"type": "object"})
    if form.schema_ is None:
        raise InvalidRequest("Missing required parameter: 'text.format.schema'.", param="text.format.schema")
    return AnswerSchema(schema=form.schema_, lenient=form.strict is False)
