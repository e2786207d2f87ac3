"""A checkpoint's chat template: messages to the text that the model was trained to answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import orjson
from jinja2 import nodes

from protos.errors import InvalidRequest, Misconfigured
from protos.model_files.files_seam import ModelFiles
from protos.model_files.plain_files import read_text
from protos.model_files.templates import DEFAULT, TOOL_USE, chat_templates
from router.text import reasoning
from router.text.bounded_template import BoundedTemplate
from router.text.control import ControlTexts, Marks, Rendered

log = logging.getLogger("baton.router")

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_SYSTEM = ("system", "developer")
_LATER = ("system", "user", "system", "assistant", "user")
_AFTER_RESULT = ("user", "calls", "tool", "user")
_REPEATED = {"user": ("user", "user"), "assistant": ("user", "assistant", "assistant")}

# About a millisecond of a template's time: longer conversations are written beside the event loop.
SHORT_MESSAGES = 64
SHORT_CHARS = 100_000
PART_CHARS = 1_000  # a text part costs as much time as this many characters

_REASONING_FIELDS = ("thinking", "reasoning")  # other names of `reasoning_content`, in templates that read them
_TEXTS = ("content", "reasoning_content", *_REASONING_FIELDS, "refusal")  # keys of a message; other strings are names

_RESULT_ROLES = ("observation", "environment")  # of a tool's result, where a template does not know "tool"

# Marks the end of the text to be continued, as in transformers: found again even if the template strips around it.
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class RenderOptions(TypedDict, total=False):
    """`continue_final_message` leaves the last message open, for the model to continue it. `options` are the template's
    own variables (`enable_thinking`)."""

    add_generation_prompt: bool
    continue_final_message: bool
    options: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Thread-safe; its thread ends with it."""

    def __init__(
        self,
        source: str,
        *,
        named_tokens: Mapping[str, str] | None = None,
        added_tokens: Mapping[str, bool] | None = None,
        local_time: Callable[[], datetime] = datetime.now,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """`named_tokens` (bos_token, ...) and `local_time` (for `strftime_now`) are visible to the template.
        `with_tools` adds tools in the model's own way. `added_tokens`: the tokenizer's, and whether each is special;
        content must not pass for them. Raises BadCheckpoint for an invalid template."""
        self._template = BoundedTemplate(source, local_time)
        tree = self._template.tree
        self._wants_parts, self._wants_one_part = _reads_parts(tree), _reads_first_part(tree)
        self.controls = ControlTexts(
            added_tokens or {},
            constants=[const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)],
            written=[data.data for data in tree.find_all(nodes.TemplateData)],
        )
        self.variables = self._template.variables
        """Names that a request may set (`enable_thinking`), and those that every rendering has."""
        self.reasoning_format = reasoning.format_of(source)
        """The name of the model's reasoning format; None if the template shows none."""
        self._reasoning_fields = [name for name in _REASONING_FIELDS if _reads_field(tree, name)]
        self._with_tools = with_tools
        self._probed: dict[tuple[str, ...], bool] = {}  # conversations that the template shows
        is_shown = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self._tools_in_system = not is_shown and _reads_field(tree, "tools")
        self._argument_texts = _joins_arguments(tree)
        words = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        self._result_role = (
            "tool" if "tool" in words else next((role for role in _RESULT_ROLES if role in words), "tool")
        )
        self.is_of_pairs = {"query", "document"} <= words
        """True for the template of a reranker, which shows a query and a document instead of a conversation."""
        self._calls_in_metadata = "metadata" in words and not _reads_field(tree, "tool_calls")
        self.shows_tools = with_tools is not None or is_shown or self._tools_in_system
        """True if the template shows the model the tools of a request."""
        self.tool_source: str = source if with_tools is None else with_tools.tool_source
        """The template that shows tools."""
        self._named_tokens = dict(named_tokens or {})
        # One thread: Jinja holds the interpreter's lock, so more would only delay the loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-template")

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        named_tokens: Mapping[str, str],
        added_tokens: Mapping[str, bool] | None = None,
        *,
        file: str = "",
    ) -> ChatTemplate | None:
        """The template in `file`, else the checkpoint's; None if it has none. Raises BadCheckpoint."""
        make = partial(cls, named_tokens=named_tokens, added_tokens=added_tokens)
        if file:
            if (own := read_text(Path(file))) is None:
                raise Misconfigured(f"there is no chat template {file}: correct the path", param="chat_template")
            return make(own)
        named = chat_templates(files)
        with_tools = make(named[TOOL_USE]) if TOOL_USE in named else None
        if named and DEFAULT not in named:
            first = next((name for name in named if name != TOOL_USE), TOOL_USE)
            log.warning("%s has no chat template 'default', but %s: %r is used", files.path, ", ".join(named), first)
            named[DEFAULT] = named[first]
        return make(named[DEFAULT], with_tools=with_tools) if named else None

    async def prompt(self, messages: Sequence[Message], **how: Unpack[RenderOptions]) -> Rendered:
        """Like `rendered`, on a thread if the input is long, so that the event loop stays free."""
        render = partial(self.rendered, messages, **how)
        has_tools = bool(how.get("tools")) or any("tool_calls" in message for message in messages)  # which may be large
        is_quick = self._template.is_quick and not has_tools
        if is_quick and len(messages) <= SHORT_MESSAGES and sum(map(_num_chars, messages)) <= SHORT_CHARS:
            return render()
        return await asyncio.get_running_loop().run_in_executor(self._thread, render)

    def rendered(self, messages: Sequence[Message], **how: Unpack[RenderOptions]) -> Rendered:
        """The prompt with its special tokens, so that tokenising adds none. Raises InvalidRequest with the template's
        words."""
        tools = how.get("tools", ())
        if tools and self._with_tools is not None:
            return self._with_tools.rendered(messages, **how)
        messages = self._placed(messages)
        if any("tool_calls" in message for message in messages) and self._wants_short_ids():
            messages = list(map(_with_short_ids, messages))
        if self._calls_in_metadata:
            messages = [part for message in messages for part in _with_metadata(message)]
        if tools and self._tools_in_system:
            messages = _with_tools(messages, tools)
        return self._rendered(messages, **how)

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        def written(marks: Marks) -> Rendered:
            conversation = [_marked(self._fitted(message), marks) for message in messages]
            if continue_final_message:
                conversation[-1] = _continued(conversation[-1])
            variables = {
                **self._named_tokens, **{name: marks.json(value) for name, value in (options or {}).items()},
                "messages": conversation, "tools": marks.json(list(tools)) or None, "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }  # fmt: skip
            text = self._written(variables, num_chars, marks)
            return marks.read(_cut(text) if continue_final_message else text)

        num_chars = len(orjson.dumps([messages, tools, options]))
        marks = Marks(self.controls)
        rendered = written(marks)
        if marks.has_suspects:
            veiled = written(Marks(self.controls, veils=True))
            if veiled.written_controls() != rendered.written_controls():
                return veiled
        return rendered

    def _written(self, variables: Mapping[str, Any], num_chars: int, marks: Marks) -> str:
        try:
            return self._template.render(variables, num_chars)
        except ValueError as error:
            raise InvalidRequest(
                f"The model's chat template refuses the messages: {marks.read(str(error)).text}", param="messages"
            ) from error

    def _placed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation with each system turn where the template has a place for it. A later one is joined to the
        user's turn beside it, or to the tool's result before it, so that the prompt up to there keeps its cached
        prefix. Neighbouring turns of one role are joined where roles must alternate."""
        placed: list[list[Message]] = []
        joins = False  # with the last turn, which was the system's
        for message in messages:
            role, last, moves = message["role"], placed[-1][0] if placed else None, False
            if role == "developer" and not self._shows(0, "developer", "user"):
                role = "system"
            if role in _SYSTEM and last is not None and not self._shows(2, *_LATER):
                role, moves = last["role"] if last["role"] in _SYSTEM else "user", True
            if role == "user" and last is not None and last["role"] == "tool" and not self._shows(3, *_AFTER_RESULT):
                role, moves = "tool", True
            repeats = last is not None and role == last["role"]
            if (
                last is not None
                and repeats
                and (moves or (joins and role == "user") or self._alternates(last, message))
            ):
                placed[-1].append(message)
            else:
                placed.append([message if role == message["role"] else {**message, "role": role}])
            joins = moves
        return [joined(*turns) for turns in placed]

    def _alternates(self, turn: Message, other: Message) -> bool:
        roles = _REPEATED.get(turn["role"])
        has_calls = turn.get("tool_calls") or other.get("tool_calls")
        return roles is not None and not has_calls and not self._shows(len(roles) - 1, *roles)

    def _wants_short_ids(self) -> bool:
        """Whether ids of calls must be nine letters or digits, as Mistral's are: other APIs' ids are refused."""
        return self._shows(0, "user", "calls") and not self._shows(0, "user", "long calls")

    def roles(self) -> list[str]:
        """The roles that the template takes, in a conversation of one message or after a user's. "developer" is
        included if "system" is."""
        taken = {role for role in ROLES if self._shown(role) is not None or self._shown("user", role) is not None}
        return [role for role in ROLES if role in taken or (role == "developer" and "system" in taken)]

    def _shows(self, place: int, *roles: str) -> bool:
        if roles not in self._probed:
            self._probed[roles] = f"turn {place}" in (self._shown(*roles) or "")
        return self._probed[roles]

    def _shown(self, *roles: str) -> str | None:
        """Such a conversation's prompt; None if the template refuses it, or has computed for too long before."""
        if self._template.was_ended:
            return None
        with suppress(InvalidRequest):
            return self._rendered([_turn(role, f"turn {number}") for number, role in enumerate(roles)]).text
        return None

    def _fitted(self, message: Message) -> dict[str, Any]:
        content, fitted = message.get("content"), dict(message)
        if self._reasoning_fields and "reasoning_content" in fitted:
            fitted |= dict.fromkeys(self._reasoning_fields, fitted["reasoning_content"])
        if self._argument_texts and fitted.get("tool_calls"):
            fitted["tool_calls"] = [_with_text(call) for call in fitted["tool_calls"]]
        if fitted.get("role") == "tool":
            fitted["role"] = self._result_role
        if isinstance(content, list) and (
            not self._wants_parts
            or (self._wants_one_part and len(content) > 1 and message["role"] in ("system", "assistant"))
        ):
            fitted["content"] = _text(message)
        return fitted


def joined(turn: Message, *others: Message) -> dict[str, Any]:
    texts = filter(None, map(_text, (turn, *others)))
    return dict(turn) | ({"content": "\n\n".join(texts)} if others else {})


def _text(turn: Message) -> str:
    content = turn.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_short_ids(message: Message) -> Message:
    calls = [call | {"id": _short_id(call["id"])} if "id" in call else call for call in message.get("tool_calls") or ()]
    result = message.get("tool_call_id")
    return {
        **message, **({"tool_calls": calls} if calls else {}), **({"tool_call_id": _short_id(result)} if result else {})
    }  # fmt: skip


def _short_id(text: str) -> str:
    is_short = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:9]


def _turn(role: str, text: str) -> Message:
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
    if role == "long calls":
        call["id"] = "call_000000000"
    if role in ("calls", "long calls"):
        return {"role": "assistant", "tool_calls": [call]}
    return {"role": role, "content": text} | ({"tool_call_id": call["id"], "name": "f"} if role == "tool" else {})


def _reads_parts(tree: nodes.Template) -> bool:
    names = {"content"} | {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"})
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _reads_first_part(tree: nodes.Template) -> bool:
    return any(
        isinstance(item.arg, nodes.Const) and item.arg.value == 0 and _is_content(item.node, {"content"})
        for item in tree.find_all(nodes.Getitem)
    )


def _reads_field(tree: nodes.Template, name: str) -> bool:
    return any(_field_of(node) == name for node in tree.find_all((nodes.Getattr, nodes.Getitem)))


def _joins_arguments(tree: nodes.Template) -> bool:
    """Whether the template adds a call's arguments to a text, as DeepSeek's do: they are a text themselves then."""
    joined = (side for node in tree.find_all(nodes.Add) for side in (node.left, node.right))
    return any(_field_of(side) == "arguments" for side in joined)


def _field_of(node: nodes.Node) -> object:
    match node:
        case nodes.Getattr(attr=attribute):
            return attribute
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return value
        case _:
            return None


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_metadata(message: Message) -> Iterator[Message]:
    """The message, and each of its calls as a turn of its own, for GLM-4-0414's template."""
    if message.get("content") or not message.get("tool_calls"):
        yield {name: value for name, value in message.items() if name != "tool_calls"}
    for call in message.get("tool_calls") or ():
        function = _with_text(call)["function"]
        yield {"role": "assistant", "metadata": function["name"], "content": function["arguments"]}


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Adds the tools to the system message, as Phi-4-mini's template reads them."""
    shown = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, *others = messages
    if first.get("role") != "system":
        first, others = {"role": "system", "content": ""}, list(messages)
    return [{**first, "tools": shown}, *others]


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr=attribute):
            return attribute == "content"
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return bool(value == "content")
        case _:
            return False


def _num_chars(message: Message) -> int:
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(PART_CHARS + len(part["text"]) for part in content)


def _marked(message: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """Marks a message's content. Its role is one of ours, since a template may build a control text from it ('<|' +
    role + '|>')."""
    is_model = message.get("role") == "assistant"
    for name, value in message.items():
        if name == "role":
            continue
        if isinstance(value, str) and name in _TEXTS:
            message[name] = marks.content(value, is_model=is_model)
        elif name == "content" and value:
            message[name] = [{**part, "text": marks.content(part["text"], is_model=is_model)} for part in value]
        else:
            message[name] = marks.json(value)
    return message


def _continued(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + _CONTINUE_HERE}
    if isinstance(content, list) and content:
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + _CONTINUE_HERE}]}
    raise InvalidRequest(
        "'continue_final_message' needs a last message with content: give it text, or leave the parameter out",
        param="continue_final_message",
    )


def _cut(text: str) -> str:
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0:
        raise InvalidRequest(
            "The model's chat template leaves out the last message, so it cannot be continued",
            param="continue_final_message",
        )
    before = text[:at]
    return before if text.startswith(_CONTINUE_HERE, at) else before.rstrip()
