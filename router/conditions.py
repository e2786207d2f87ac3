"""Dependencies between parameters of a body, as JSON Schema: `allOf` of its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Condition = dict[str, Any]


def only_with(name: str, given: Mapping[str, Any], other: str, needed: Mapping[str, Any]) -> Condition:
    """A parameter that, where it is like `given`, needs `other` to be like `needed`, or left out if null is."""
    then: dict[str, Any] = {"properties": {other: needed}}
    if None not in needed["enum"]:
        then["required"] = [other]
    return {"if": {"properties": {name: given}, "required": [name]}, "then": then}


def is_given(name: str, kind: str) -> Condition:
    return {"properties": {name: {"type": kind}}, "required": [name]}


NUMBER, TRUE, FALSE = {"type": "number"}, {"enum": [True]}, {"enum": [False, None]}
_OBJECT = {"type": "object"}
_SOME = {"type": "array", "minItems": 1}
_JSON = {"type": "object", "properties": {"type": {"enum": ["json_object", "json_schema"]}}}

TOGETHER = (
    only_with("stream_options", _OBJECT, "stream", TRUE),
    only_with("prompt_logprobs", NUMBER, "stream", FALSE),
    only_with("structured_outputs", _OBJECT, "ignore_eos", FALSE),
)
"""For chat and completions."""

_CALLS = {"properties": {"tool_calls": _SOME}, "required": ["tool_calls"]}
OF_MESSAGES: tuple[Condition, ...] = (
    {"if": _CALLS, "then": {"properties": {"role": {"const": "assistant"}}}},
    {
        "if": {"not": _CALLS},
        "then": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
    },
)

OF_TOOLS: tuple[Condition, ...] = (
    {
        "if": {"properties": {"tool_choice": {"not": {"enum": ["none", "auto", None]}}}, "required": ["tool_choice"]},
        "then": {"properties": {"tools": _SOME}, "required": ["tools"]},
    },
    {
        "if": {
            "properties": {"structured_outputs": _OBJECT, "tools": _SOME},
            "required": ["structured_outputs", "tools"],
        },
        "then": {"properties": {"tool_choice": {"const": "none"}}, "required": ["tool_choice"]},
    },
)
"""For chat; without effect if there are no tools."""

OF_FORMS: tuple[Condition, ...] = (
    {
        "if": {"properties": {"structured_outputs": _OBJECT}, "required": ["structured_outputs"]},
        "then": {"properties": {"response_format": {"properties": {"type": {"const": "text"}}}}},
    },
    only_with("response_format", _JSON, "ignore_eos", FALSE),
)
"""For chat."""
