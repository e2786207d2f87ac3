"""Answers read by the types of the packages `openai` and `anthropic`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

OURS = {
    "reasoning_content", "reasoning", "token_ids", "prompt_token_ids", "prompt_logprobs", "max_model_len", "root",
    "parent", "weights", "prefill_progress", "store", "name",
}  # fmt: skip
"""Fields that clients of vLLM read, and our own."""


def read_as(kind: Any, answer: Any) -> Any:
    """Reads the answer as `kind`. Fails for missing or unknown fields."""
    value = _adapter(kind).validate_python(answer)
    assert set(_unknown(value)) <= OURS
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        value = list(dict(value).values())
    for part in value if isinstance(value, list) else ():
        yield from _unknown(part)
