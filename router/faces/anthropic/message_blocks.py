"""Messages, made of blocks, to the messages and tools that chat templates read: the same as a chat's would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos.hints import listed
from router.faces.anthropic.messages_body import (
    AssistantTurn,
    ContentSource,
    DocumentBlock,
    PromptBody,
    SearchResultBlock,
    SystemTurn,
    TextBlock,
    Texts,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from router.faces.conversation.parts import Ignored, listed_tools, missing, not_text, placed, text_part, wrong
from router.faces.conversation.tooling import AnswerSchema, Tooling, ToolUse, check_callable, tooling_of
from router.gateway import Gateway
from router.http.body import OpenBody, OtherPart
from router.text.chat_template import joined

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
    for where, message in placed(body.messages, "messages"):
        match message:
            case OtherPart():
                raise wrong(f"{where}.role", message.role, "user, assistant, system")
            case AssistantTurn(content=list() as blocks):
                messages.append(_assistant(blocks, f"{where}.content", ignored))
            case UserTurn(content=list() as blocks) | SystemTurn(content=list() as blocks):
                _append_turn(messages, message.role, blocks, f"{where}.content", ignored)
            case _:
                _append(messages, {"role": message.role, "content": message.content})
    return messages


def is_prefilled(messages: list[Template]) -> bool:
    """True if the answer is to continue with the last message."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def _system(system: str | Texts | None, ignored: Ignored) -> str | list[Template] | None:
    if system is None or isinstance(system, str):
        return system or None
    parts = []
    for where, block in placed(system, "system"):
        text = _text(block, where, ("text",))
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


def _append_turn(messages: list[Template], role: str, blocks: Sequence[OpenBody], where: str, ignored: Ignored) -> None:
    """Appends a user's turn. Each tool's result is a turn of its own."""
    texts: list[Template] = []
    is_empty = True
    for place, block in placed(blocks, where):
        match block:
            case ToolResultBlock():
                if texts:
                    _append(messages, {"role": role, "content": texts})
                texts = []
                messages.append(_result(block, place, ignored))
            case OtherPart() if _is_foreign(block.type):
                ignored.add(f"{place}: {block.type}")
                continue
            case _:
                texts.append(text_part(_text(block, place, (*_READ, "tool_result") if role == "user" else ("text",))))
        is_empty = False
    if texts or is_empty:
        _append(messages, {"role": role, "content": texts or ""})


def _result(block: ToolResultBlock, where: str, ignored: Ignored) -> Template:
    if block.is_error:  # templates have no field for errors; the text says so
        ignored.add(f"{where}.is_error")
    content: Any = block.content or ""
    if isinstance(content, list):
        content = [text_part(_text(part, place, _READ)) for place, part in placed(content, f"{where}.content")]
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _assistant(blocks: Sequence[OpenBody], where: str, ignored: Ignored) -> Template:
    texts: list[Template] = []
    thoughts: list[str] = []
    calls: list[Template] = []
    for place, block in placed(blocks, where):
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case OtherPart() if _is_foreign(block.type):
                ignored.add(f"{place}: {block.type}")
            case _:
                texts.append(text_part(_text(block, place, ("text", "thinking", "tool_use"))))
    message: Template = {"role": "assistant"}
    if texts or not calls:
        message["content"] = texts or ""
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: OpenBody, where: str, kinds: Sequence[str]) -> str:
    """The text of a block, with its title and source. `kinds`: the kinds allowed here."""
    match block:
        case TextBlock():
            return block.text
        case ToolReferenceBlock():
            return block.tool_name
        case TextSource():
            return block.data
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *_texts(block.content, where)])
        case ContentSource():
            return block.content if isinstance(block.content, str) else "\n".join(_texts(block.content, where))
        case DocumentBlock():
            heads = [head for head in (block.title, block.context) if head is not None]
            return "\n".join([*heads, _text(block.source, f"{where}.source", ("text", "content"))])
    assert isinstance(block, OtherPart)
    if block.type in _NO_TEXT:
        raise not_text(where, block.type)
    raise missing(f"{where}.type") if block.type is None else wrong(f"{where}.type", block.type, listed(kinds))


def _texts(content: Texts, where: str) -> list[str]:
    return [_text(part, place, ("text",)) for place, part in placed(content, f"{where}.content")]


def _is_foreign(kind: Any) -> bool:
    """Whether it is a block of a tool that Anthropic's own servers run."""
    return kind in _OF_SERVER or (isinstance(kind, str) and kind != "tool_result" and kind.endswith("_tool_result"))


def messages_tooling(body: PromptBody, gateway: Gateway, ignored: Ignored) -> Tooling:
    """Reads the tools. It skips those that Anthropic's servers run, or whose schema only its models know. Raises
    InvalidRequest."""
    tools = listed_tools(body.tools, ignored)
    functions = [tool.to_function() for tool in tools]
    choice = body.tool_choice
    kind = choice.type if choice is not None else "auto"
    if kind in ("any", "tool"):
        check_callable(functions, body.tools, kind)
    use = None
    if functions and kind != "none":
        parallel = not (choice is not None and choice.disable_parallel_tool_use)
        use = ToolUse(
            shown=[tool.shown() for tool in tools],
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
        raise missing("tool_choice.name")
    return name
