"""Messages and tools to those that chat templates read: the same as a chat's would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.errors import InvalidRequest, UnsupportedParameter
from protos.hints import listed
from router.conversation.functions import function_in
from router.conversation.parts import object_in, parts_in, text_in, wrong
from router.conversation.tooling import Tooling, ToolUse, tooling_of
from router.gateway import Gateway
from router.ollama.ollama_bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody

OLLAMA_ROLES = ("system", "user", "assistant", "tool")

Template = dict[str, Any]


def conversation_of(body: OllamaChatBody) -> list[Template]:
    """Calls have no ids in this API: they get numbers, and results belong to them in their order. Raises
    InvalidRequest."""
    messages: list[Template] = []
    waiting: list[str] = []
    num_calls = 0
    for where, message in parts_in(body.messages, "messages"):
        role = message.get("role")
        if role not in OLLAMA_ROLES:
            raise wrong(f"{where}.role", role, listed(OLLAMA_ROLES))
        if not isinstance(images := message.get("images"), list | None):
            raise wrong(f"{where}.images", images, "a list without images: this model reads text only")
        if images:
            problem = f"'{where}.images' has images: this model reads text only; leave them out"
            raise UnsupportedParameter(problem, param=f"{where}.images")
        shown: Template = {"role": role}
        if not isinstance(calls := message.get("tool_calls"), list | None):
            raise wrong(f"{where}.tool_calls", calls, "a list of objects")
        if not calls or message.get("content") not in ("", None):
            shown["content"] = "" if message.get("content") in ("", None) else text_in(message, "content", where)
        if message.get("tool_name") is not None:
            shown["name"] = text_in(message, "tool_name", where)
        if message.get("thinking") not in ("", None):
            shown["reasoning_content"] = text_in(message, "thinking", where)
        if role == "tool" and waiting:
            shown["tool_call_id"] = waiting.pop(0)
        if calls:
            if role != "assistant":
                problem = f"'{where}.tool_calls' is only allowed in an assistant's message: leave it out"
                raise InvalidRequest(problem, param=f"{where}.tool_calls")
            shown["tool_calls"] = []
            for place, call in parts_in(calls, f"{where}.tool_calls"):
                num_calls += 1
                waiting.append(f"{num_calls:09}")
                shown["tool_calls"].append(_call(call, place, waiting[-1]))
        messages.append(shown)
    return messages


def _call(call: Mapping[str, Any], where: str, call_id: str) -> Template:
    function = object_in(call, "function", where)
    where = f"{where}.function"
    called = {"name": text_in(function, "name", where), "arguments": object_in(function, "arguments", where)}
    return {"id": call_id, "type": "function", "function": called}


def prompt_of(body: OllamaGenerateBody) -> list[Template]:
    """A prompt as a conversation of one turn."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def ollama_tooling(body: OllamaBody, gateway: Gateway) -> Tooling:
    """Raises InvalidRequest."""
    functions, shown = [], []
    for where, tool in parts_in((body.tools if isinstance(body, OllamaChatBody) else None) or [], "tools"):
        if tool.get("type") != "function":
            raise wrong(f"{where}.type", tool.get("type"), "function")
        function, as_shown = function_in(object_in(tool, "function", where), f"{where}.function", schema="parameters")
        functions.append(function)
        shown.append(as_shown)
    use = ToolUse(shown=shown, functions=functions) if functions else None
    return tooling_of(gateway, use, body.answer_schema(), param="format")
