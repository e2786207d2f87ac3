"""Messages, made of blocks, to the messages and tools that chat templates read: the same as a chat's would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.errors import InvalidRequest, UnsupportedParameter
from protos.hints import listed
from router.anthropic.messages_body import PromptBody
from router.conversation.functions import function_in
from router.conversation.parts import Ignored, object_in, parts_in, text_in, text_part, wrong
from router.conversation.tooling import AnswerSchema, Tooling, ToolUse, check_callable, tooling_of
from router.gateway import Gateway
from router.text.chat_template import joined

_ROLES = ("user", "assistant", "system")
_NO_TEXT = ("image", "video", "audio", "base64", "url", "file")
_READ = ("text", "search_result", "document", "tool_reference")
_OF_SERVER = ("redacted_thinking", "server_tool_use", "container_upload", "mid_conv_system")
_BILLING = "x-anthropic-billing-header:"
"""Claude Code puts such a line before its system prompt. It differs with each request: the cached prefix would end
there."""

Template = dict[str, Any]


def conversation_of(body: PromptBody, ignored: Ignored) -> list[Template]:
    """Neighbouring user turns become one. Raises InvalidRequest."""
    messages: list[Template] = []
    system = _system(body.system, ignored)
    if system is not None:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise wrong(f"{where}.role", role, listed(_ROLES))
        if content is None:
            raise InvalidRequest(f"Missing required parameter: '{where}.content'.", param=f"{where}.content")
        if not isinstance(content, str | list):
            raise wrong(f"{where}.content", content, "a string or a list of blocks")
        if isinstance(content, str):
            _append(messages, {"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content", ignored))
        else:
            _append_turn(messages, str(role), content, f"{where}.content", ignored)
    return messages


def is_prefilled(messages: list[Template]) -> bool:
    """True if the answer is to go on with the last message."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def _system(given: str | list[dict[str, Any]] | None, ignored: Ignored) -> str | list[Template] | None:
    if given is None or isinstance(given, str):
        return given or None
    parts = []
    for where, block in parts_in(given, "system"):
        if block.get("type") != "text":
            raise _unknown(block, where, ("text",))
        text = _text_of(block, where)
        if text.startswith(_BILLING):
            ignored.add(where)
        else:
            parts.append(text_part(text))
    return parts or None


def _append(messages: list[Template], message: Template) -> None:
    if messages and message["role"] == "user" == messages[-1]["role"]:
        messages[-1] = joined(messages[-1], message)
    else:
        messages.append(message)


def _append_turn(messages: list[Template], role: str, blocks: list[Any], where: str, ignored: Ignored) -> None:
    """A user's turn: each tool's result is a turn of its own."""
    texts: list[Template] = []
    is_empty = True
    for place, block in parts_in(blocks, where):
        match block.get("type"):
            case "tool_result" if role == "user":
                if texts:
                    _append(messages, {"role": role, "content": texts})
                texts = []
                messages.append(_result(block, place, ignored))
            case kind if _is_foreign(kind):
                ignored.add(f"{place}: {kind}")
                continue
            case "text":
                texts.append(text_part(_text_of(block, place)))
            case _ if role == "user":
                texts.append(text_part(_read(block, place, (*_READ, "tool_result"))))
            case _:
                raise _unknown(block, place, ("text",))
        is_empty = False
    if texts or is_empty:
        _append(messages, {"role": role, "content": texts or ""})


def _result(block: Mapping[str, Any], where: str, ignored: Ignored) -> Template:
    if block.get("is_error"):  # its text says so: templates have no place for it
        ignored.add(f"{where}.is_error")
    content = block.get("content")
    parts: str | list[Template] = ""
    if isinstance(content, str):
        parts = content
    elif content is not None:
        parts = []
        for place, part in parts_in(content, f"{where}.content"):
            parts.append(text_part(_read(part, place, _READ)))
    return {"role": "tool", "content": parts or "", "tool_call_id": text_in(block, "tool_use_id", where)}


def _assistant(blocks: list[Any], where: str, ignored: Ignored) -> Template:
    texts: list[Template] = []
    thoughts: list[str] = []
    calls: list[Template] = []
    for place, block in parts_in(blocks, where):
        match block.get("type"):
            case "text":
                texts.append(text_part(_text_of(block, place)))
            case "thinking":
                thoughts.append(text_in(block, "thinking", place))
            case "tool_use":
                name = text_in(block, "name", place)
                function = {"name": name, "arguments": object_in(block, "input", place)}
                calls.append({"id": text_in(block, "id", place), "type": "function", "function": function})
            case kind if _is_foreign(kind):
                ignored.add(f"{place}: {kind}")
            case _:
                raise _unknown(block, place, ("text", "thinking", "tool_use"))
    message: Template = {"role": "assistant"}
    if texts or not calls:
        message["content"] = texts or ""
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read(block: Mapping[str, Any], where: str, allowed: tuple[str, ...]) -> str:
    """The text of a block that has one, with its title and source."""
    match block.get("type"):
        case "text":
            return _text_of(block, where)
        case "tool_reference":
            return text_in(block, "tool_name", where)
        case "search_result":
            heads, content = [text_in(block, name, where) for name in ("title", "source")], block.get("content")
            return "\n".join([*heads, *_texts_in(content, f"{where}.content")])
        case "document":
            heads = [text_in(block, name, where) for name in ("title", "context") if block.get(name) is not None]
            return "\n".join([*heads, *_source(object_in(block, "source", where), f"{where}.source")])
    raise _unknown(block, where, allowed)


def _source(source: Mapping[str, Any], where: str) -> list[str]:
    """The texts of a document."""
    match source.get("type"):
        case "text":
            return [text_in(source, "data", where)]
        case "content":
            content = source.get("content")
            return [content] if isinstance(content, str) else _texts_in(content, f"{where}.content")
    raise _unknown(source, where, ("text", "content"))


def _texts_in(content: Any, where: str) -> list[str]:
    texts = []
    for place, part in parts_in(content, where):
        if part.get("type") != "text":
            raise _unknown(part, place, ("text",))
        texts.append(_text_of(part, place))
    return texts


def _text_of(block: Mapping[str, Any], where: str) -> str:
    """`cache_control` changes nothing: every prompt is cached."""
    control = block.get("cache_control")
    if not isinstance(control, dict | None):
        raise wrong(f"{where}.cache_control", control, 'an object such as {"type": "ephemeral"}')
    return text_in(block, "text", where)


def _is_foreign(kind: Any) -> bool:
    """Is it a block of a tool that Anthropic's own servers run?"""
    return kind in _OF_SERVER or (isinstance(kind, str) and kind != "tool_result" and kind.endswith("_tool_result"))


def _unknown(block: Mapping[str, Any], where: str, allowed: tuple[str, ...]) -> InvalidRequest:
    kind = block.get("type")
    if kind in _NO_TEXT:
        problem = f"'{where}' has the type {kind}: this model reads text only; leave it out, or give its text"
        return UnsupportedParameter(problem, param=where)
    if kind is None:
        return InvalidRequest(f"Missing required parameter: '{where}.type'.", param=f"{where}.type")
    return wrong(f"{where}.type", kind, listed(allowed))


def messages_tooling(body: PromptBody, gateway: Gateway, ignored: Ignored) -> Tooling:
    """Tools that Anthropic's servers run, or whose schema only its models know, are skipped. Raises InvalidRequest."""
    shown, functions = [], []
    for where, tool in parts_in(body.tools or [], "tools"):
        if (kind := tool.get("type")) not in (None, "custom"):
            if not isinstance(kind, str):
                raise wrong(f"{where}.type", kind, "a string")
            ignored.add(f"{where}: {kind}")
            continue
        function, as_shown = function_in(tool, where, schema="input_schema", needs_schema=True)
        functions.append(function)
        shown.append(as_shown)
    choice = body.tool_choice
    kind = choice.type if choice is not None else "auto"
    if kind in ("any", "tool"):
        check_callable(functions, body.tools, kind)
    use = None
    if functions and kind != "none":
        parallel = not (choice is not None and choice.disable_parallel_tool_use)
        use = ToolUse(
            shown=shown,
            functions=functions,
            choice="auto" if kind == "auto" else "required",
            allowed=[_chosen(choice.name)] if choice is not None and kind == "tool" else None,
            is_named=kind == "tool",
            parallel=parallel,
        )
    form = body.output_config.format if body.output_config is not None else None
    form = form or body.output_format
    param = "output_format" if form is body.output_format else "output_config.format"
    schema = AnswerSchema(schema=form.schema_) if form is not None else None
    return tooling_of(gateway, use, schema, param=param)


def _chosen(name: str | None) -> str:
    if name is None:
        raise InvalidRequest("Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
    return name
