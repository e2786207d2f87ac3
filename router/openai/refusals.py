"""Parameters that OpenAI documents and Baton does not offer: accepted at the value where they change nothing,
refused by name at any other."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from protos.errors import UnsupportedParameter

Harmless = Callable[[Any], bool]


def _never(value: Any) -> bool:
    return False


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _one_of(*values: Any) -> Harmless:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


# Identifiers say who asks, which changes no answer. `metadata` is kept with stored answers; nothing is stored.
COMPLETION_REFUSALS: Mapping[str, Harmless] = {
    "suffix": _one_of(""),
    "user": _text,
}
CHAT_REFUSALS: Mapping[str, Harmless] = {
    "audio": _never,
    "function_call": _one_of("none"),
    "functions": _one_of([]),
    "metadata": lambda value: isinstance(value, dict),
    "modalities": _one_of(["text"]),
    "moderation": _never,
    "parallel_tool_calls": _one_of(True, False),
    "prediction": _never,
    "prompt_cache_options": _never,
    "prompt_cache_retention": _one_of("in_memory", "in-memory"),
    "reasoning_effort": _never,
    "response_format": _one_of({"type": "text"}),
    "safety_identifier": _text,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "tool_choice": _one_of("none"),
    "tools": _one_of([]),
    "user": _text,
    "verbosity": _one_of("medium"),
    "web_search_options": _never,
}
# What OpenAI's own client sends back when an answer is put into the next request.
MESSAGE_REFUSALS: Mapping[str, Harmless] = {
    "annotations": _one_of([]),
    "audio": _never,
    "function_call": _never,
    "refusal": _never,
    "tool_calls": _one_of([]),
}


def without_harmless(body: Mapping[str, Any], refusals: Mapping[str, Harmless], *, where: str = "") -> dict[str, Any]:
    """The body without parameters that change nothing. Raises UnsupportedParameter for one that would."""
    kept = dict(body)
    for name in refusals.keys() & body.keys():
        value = kept.pop(name)
        if value is not None and not refusals[name](value):
            told = reprlib.repr(value)  # bounded in depth too: an object may be nested deeper than repr() can go
            raise UnsupportedParameter(
                f"'{where}{name}' is not supported with the value {told[:80]}{'...' if len(told) > 80 else ''}: "
                "this server does not offer it; leave it out",
                param=f"{where}{name}",
            )
    return kept
