"""Parameters that OpenAI documents and Baton does not offer: accepted at the value where they change nothing,
refused by name at any other."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Harmless:
    """Where a parameter changes nothing, for us and as JSON Schema; null never does."""

    accepts: Callable[[Any], bool]
    schema: Mapping[str, Any]


def _one_of(*values: Any) -> Harmless:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return Harmless(accepts, {"enum": [*values, None]})


_NEVER = Harmless(lambda value: False, {"type": "null"})
_TEXT = Harmless(lambda value: isinstance(value, str), {"type": ["string", "null"]})
_OBJECT = Harmless(lambda value: isinstance(value, dict), {"type": ["object", "null"]})


# Identifiers say who asks, which changes no answer. `metadata` is kept with stored answers; nothing is stored.
COMPLETION_REFUSALS: Mapping[str, Harmless] = {
    "suffix": _one_of(""),
    "user": _TEXT,
}
CHAT_REFUSALS: Mapping[str, Harmless] = {
    "audio": _NEVER,
    "function_call": _one_of("none"),
    "functions": _one_of([]),
    "metadata": _OBJECT,
    "modalities": _one_of(["text"]),
    "moderation": _NEVER,
    "parallel_tool_calls": _one_of(True, False),
    "prediction": _NEVER,
    "prompt_cache_options": _NEVER,
    "prompt_cache_retention": _one_of("in_memory", "in-memory"),
    "reasoning_effort": _NEVER,
    "response_format": _one_of({"type": "text"}),
    "safety_identifier": _TEXT,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "tool_choice": _one_of("none"),
    "tools": _one_of([]),
    "user": _TEXT,
    "verbosity": _one_of("medium"),
    "web_search_options": _NEVER,
}
# What OpenAI's own client sends back when an answer is put into the next request.
MESSAGE_REFUSALS: Mapping[str, Harmless] = {
    "annotations": _one_of([]),
    "audio": _NEVER,
    "function_call": _NEVER,
    "refusal": _NEVER,
    "tool_calls": _one_of([]),
}


def without_harmless(body: Mapping[str, Any], refusals: Mapping[str, Harmless], *, where: str = "") -> dict[str, Any]:
    """The body without parameters that change nothing. Raises UnsupportedParameter for one that would."""
    kept = dict(body)
    for name in refusals.keys() & body.keys():
        value = kept.pop(name)
        if value is not None and not refusals[name].accepts(value):
            told = reprlib.repr(value)  # bounded in depth too: an object may be nested deeper than repr() can go
            raise UnsupportedParameter(
                f"'{where}{name}' is not supported with the value {told[:80]}{'...' if len(told) > 80 else ''}: "
                "this server does not offer it; leave it out",
                param=f"{where}{name}",
            )
    return kept
