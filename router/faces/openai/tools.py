"""Tools a model may call, in requests and in the messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from router.faces.conversation.functions import MAX_TOOLS, FunctionSpec
from router.http.body_validation import Body, FirstWrong, at_most, read_json

MAX_CALLS = 128  # names in one message

CacheControl = dict[str, Any] | None
CACHED: Any = Field(default=None, exclude=True, description="an object: all is cached")
_FUNCTION = '"function": no other kind of tool is offered'


class ChatFunction(FunctionSpec):
    model_config = ConfigDict(extra="forbid")

    cache_control: CacheControl = CACHED


class ToolSpec(Body):
    type: Literal["function"] = Field(description=_FUNCTION)
    function: ChatFunction = Field(description="an object with the function's name and parameters")
    cache_control: CacheControl = CACHED


class NamedFunction(Body):
    name: str = Field(description="the name of a function among the tools")


class NamedTool(Body):
    type: Literal["function"] = Field(description=_FUNCTION)
    function: NamedFunction = Field(description="an object with the function's name")


class Allowance(Body):
    mode: Literal["auto", "required"] = Field(description="auto or required")
    tools: Annotated[list[NamedTool], FirstWrong(), at_most(MAX_TOOLS)] = Field(
        min_length=1, max_length=MAX_TOOLS, description=f"a list of 1 to {MAX_TOOLS} of the tools, by name"
    )


class AllowedTools(Body):
    type: Literal["allowed_tools"] = Field(description='"allowed_tools"')
    allowed_tools: Allowance = Field(description="an object with mode and tools")


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools
TOOL_CHOICES = (
    'none, auto, required or an object such as {"type": "function", "function": {"name": "f"}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
)


class CalledFunction(Body):
    name: str = Field(description="a string")
    arguments: str = Field(description="a string")


class ToolCall(Body):
    id: str = Field(description="a string")
    type: Literal["function"] = Field(description=_FUNCTION)
    function: CalledFunction = Field(description="an object with name and arguments")
    index: int | None = Field(default=None, description="an integer")

    def to_template(self) -> dict[str, Any]:
        """A call in the form of chat templates: arguments are an object, or the original text if the model wrote no
        object."""
        try:
            arguments = read_json(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}
