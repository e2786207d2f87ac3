"""Functions that a request offers to the model, read as `parts`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from router.conversation.parts import object_in, text_in, wrong
from router.http.body_validation import MAX_DEPTH, shallow
from router.tools.calls import Function

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)


def function_in(
    tool: Mapping[str, Any], where: str, *, schema: str, needs_schema: bool = False
) -> tuple[Function, dict[str, Any]]:
    """The function, and what a chat template reads of it. `schema` is the field with its JSON Schema. Raises
    InvalidRequest."""
    name = text_in(tool, "name", where)
    if not _NAME.fullmatch(name):
        raise wrong(f"{where}.name", name, "1 to 128 letters, digits, underscores, dots and dashes")
    checks: tuple[tuple[str, type, str], ...] = (("description", str, "a string"), ("strict", bool, "true or false"))
    for field, kind, expected in checks:
        if (value := tool.get(field)) is not None and not isinstance(value, kind):
            raise wrong(f"{where}.{field}", value, expected)
    parameters = None
    if needs_schema or tool.get(schema) is not None:
        parameters = object_in(tool, schema, where)
        try:
            shallow(parameters)
        except ValueError:
            raise wrong(f"{where}.{schema}", parameters, f"a JSON Schema, nested at most {MAX_DEPTH} deep") from None
        if (kind := parameters.get("type", "object")) != "object":
            raise wrong(f"{where}.{schema}.type", kind, '"object": arguments have names')
    strict = tool.get("strict")
    fields = {"name": name, "description": tool.get("description"), "parameters": parameters, "strict": strict}
    shown = {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
    return Function(name=name, parameters=parameters, strict=bool(strict)), shown
