"""What every reply begins with, and how its use of tokens is told."""

from __future__ import annotations

from typing import Any

from router.gateway import Gateway
from router.text.answer import Usage


def reply_head(gateway: Gateway, request_id: str, kind: str) -> dict[str, Any]:
    """`kind` is OpenAI's name of the object."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(gateway.wall_clock()),
        "model": gateway.card.name,
        "system_fingerprint": gateway.card.fingerprint,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    nothing = {
        "audio_tokens": 0,
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": nothing,
    }
