"""Limits on sizes, checked before validation: a large body would delay all tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from protos.errors import ContextLengthExceeded, InvalidRequest
from router.text.model_card import ModelCard
from router.text.sampling_request import MAX_CHOICES, check_length

MAX_PARAMETERS = 256  # parameters of one object
MAX_PIECES = 4096  # messages and text parts of a conversation


def check_parameters(body: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an object of more parameters than any request has."""
    if len(body) > MAX_PARAMETERS:
        raise InvalidRequest(f"One object has {len(body)} parameters: at most {MAX_PARAMETERS} are read")


def check_sizes(body: Mapping[str, Any], known: Collection[str], card: ModelCard) -> None:
    """Checks parameters that can be long. Raises InvalidRequest, and ContextLengthExceeded for a prompt longer than the
    context."""
    check_parameters(body)
    if "messages" in known and isinstance(body.get("messages"), list):
        _check_messages(body["messages"], card, "messages")
    if "input" in known and isinstance(found := body.get("input"), list):
        check = _check_messages if any(isinstance(one, dict) for one in found) else _check_prompts
        check(found, card, "input")
    if "prompt" in known and isinstance(body.get("prompt"), list):
        _check_prompts(body["prompt"], card, "prompt")
    if "tokens" in known and isinstance(body.get("tokens"), list) and len(body["tokens"]) > card.max_model_len:
        raise _too_many("tokens", f"{len(body['tokens'])} token ids", card.max_model_len, card)


def _check_messages(messages: list[Any], card: ModelCard, param: str) -> None:
    contents = (one.get("content") for one in messages if isinstance(one, dict))
    num_pieces = len(messages) + sum(len(one) for one in contents if isinstance(one, list))
    most = min(card.max_model_len, MAX_PIECES)
    if num_pieces > most:
        raise _too_many(param, f"{num_pieces} messages and text parts", most, card)


def _check_prompts(prompts: list[Any], card: ModelCard, param: str) -> None:
    """Checks the number of prompts. Token ids may be one prompt or many."""
    if prompts and isinstance(prompts[0], int):
        check_length(len(prompts), card, param=param)
        return
    if len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"'{param}' has {len(prompts)} prompts: it must have at most {MAX_CHOICES}", param=param)
    check_length(max((len(one) for one in prompts if isinstance(one, list)), default=0), card, param=param)


def _too_many(param: str, what: str, most: int, card: ModelCard) -> ContextLengthExceeded:
    limit = f"This model's maximum context length is {card.max_model_len} tokens. However, '{param}' has {what}"
    return ContextLengthExceeded(f"{limit}: at most {most} are read", param=param)
