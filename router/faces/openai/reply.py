"""The fields that every reply begins with, and its usage of tokens."""

from __future__ import annotations

from typing import Any

from router.gateway import Gateway
from router.text.sampling_request import TextRequest
from router.text.text_stream import TextDelta, Usage

DONE = b"data: [DONE]\n\n"
"""The end of a stream that has not failed."""


def reply_head(gateway: Gateway, request_id: str, kind: str) -> dict[str, Any]:
    """`kind` is OpenAI's name of the object."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(gateway.wall_clock()),
        "model": gateway.card.name,
        "system_fingerprint": gateway.fingerprint,
    }


def progress_body(ask: TextRequest, piece: TextDelta) -> dict[str, Any]:
    """The progress of a prompt, in a chunk without choices like that of the usage."""
    progress = {
        "index": piece.index,
        "computed_tokens": piece.num_prompt_computed,
        "cached_tokens": piece.num_cached_tokens,
        "total_tokens": len(ask.jobs[piece.index].prompt_ids),
    }
    return {"choices": [], "prefill_progress": progress}


def reasoning_fields(text: str) -> dict[str, str]:
    """A message's reasoning by both names that clients read: DeepSeek's, and that of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


def usage_body(usage: Usage) -> dict[str, Any]:
    details = {
        "audio_tokens": 0,
        "reasoning_tokens": usage.reasoning_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": details,
    }
