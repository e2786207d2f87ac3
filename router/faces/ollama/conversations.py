"""Messages and tools to those that chat templates read: the same as a chat's would be."""

from __future__ import annotations

from typing import Any

from protos.errors import InvalidRequest, UnsupportedParameter
from router.faces.conversation.parts import placed
from router.faces.conversation.tooling import Tooling, ToolUse, tooling_of
from router.faces.ollama.ollama_bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router.gateway import Gateway

Template = dict[str, Any]


def conversation_of(body: OllamaChatBody) -> list[Template]:
    """Reads the messages. Calls have no ids in this API: they are numbered, and results belong to them in order. Raises
    InvalidRequest."""
    messages: list[Template] = []
    waiting: list[str] = []
    num_calls = 0
    for where, message in placed(body.messages, "messages"):
        if message.images:
            problem = f"'{where}.images' has images: this model reads text only; leave them out"
            raise UnsupportedParameter(problem, param=f"{where}.images")
        shown: Template = {"role": message.role}
        if message.content or not message.tool_calls:
            shown["content"] = message.content or ""
        if message.tool_name is not None:
            shown["name"] = message.tool_name
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.role == "tool" and waiting:
            shown["tool_call_id"] = waiting.pop(0)
        if message.tool_calls:
            if message.role != "assistant":
                problem = f"'{where}.tool_calls' is only allowed in an assistant's message: leave it out"
                raise InvalidRequest(problem, param=f"{where}.tool_calls")
            shown["tool_calls"] = []
            for call in message.tool_calls:
                num_calls += 1
                waiting.append(f"{num_calls:09}")
                function = {"name": call.function.name, "arguments": call.function.arguments}
                shown["tool_calls"].append({"id": waiting[-1], "type": "function", "function": function})
        messages.append(shown)
    return messages


def prompt_of(body: OllamaGenerateBody) -> list[Template]:
    """A prompt as a conversation of one turn."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def ollama_tooling(body: OllamaBody, gateway: Gateway) -> Tooling:
    """Raises InvalidRequest."""
    specs = [tool.function for tool in (body.tools if isinstance(body, OllamaChatBody) else None) or ()]
    functions = [spec.to_function() for spec in specs]
    use = ToolUse(shown=[spec.shown() for spec in specs], functions=functions) if specs else None
    return tooling_of(gateway, use, body.answer_schema(), param="format")
