"""JSON Schema that bodies of several APIs share: tools, which are read one by one (`router.conversation.parts`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from router.http.body_validation import FirstWrong, at_most

MAX_TOOLS = 512
STRING = {"type": "string"}

Objects = Annotated[list[dict[str, Any]], FirstWrong()]

TOOLS: Any = Field(default=None, description=f"a list of at most {MAX_TOOLS} tools")


def tools_list(tool: dict[str, Any]) -> tuple[Any, Any]:
    """The annotations of a field with tools, each of them a `tool`."""
    return at_most(MAX_TOOLS), WithJsonSchema({"type": ["array", "null"], "items": tool, "maxItems": MAX_TOOLS})


def function_schema(schema: str, *, needs_schema: bool = False) -> dict[str, Any]:
    """A function as `function_in` reads it; `schema` is the field with its JSON Schema."""
    return {
        "type": "object",
        "required": ["name", schema] if needs_schema else ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
            "description": {"type": ["string", "null"]},
            schema: {
                "type": "object" if needs_schema else ["object", "null"],
                "properties": {"type": {"const": "object"}},
            },
            "strict": {"type": ["boolean", "null"]},
        },
    }
