"""Checks of a request before it is scheduled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvtransfer.hashing import Remembering
from protos.errors import ContextLengthExceeded, InvalidRequest
from protos.values import GenerateRequest


def check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidRequest if the prompt is empty, or a token id is not in the vocabulary."""
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
    sampling = request.sampling
    for param, token_ids in (
        ("prompt", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("label_token_ids", sampling.label_token_ids),
        ("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias)),
    ):
        if token_ids and not _are_ids(token_ids, vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(f"{param} holds token id {wrong}: ids are 0 to {vocab_size - 1}", param=param)


def check_length(request: GenerateRequest, limit: int) -> None:
    """Checks the length of prompt and answer together against `limit`. Raises InvalidRequest or
    ContextLengthExceeded."""
    num_given, max_tokens = len(request.output_ids), request.sampling.max_tokens
    if max_tokens < 0 or (num_given > 0 and num_given >= max_tokens):
        raise InvalidRequest(
            f"max_tokens is {max_tokens}: {num_given} output tokens are given already", param="max_tokens"
        )
    num_tokens = len(request.prompt_ids) + num_given
    if num_tokens + (max_tokens > 0) > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens: at most {limit - 1} fit, {limit} with the answer", param="prompt"
        )


def _are_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Whether each token id is from 0 to below `vocab_size`."""
    if not isinstance(token_ids, Remembering):
        return _are_below(token_ids, vocab_size)
    if vocab_size not in token_ids.are_below:
        token_ids.are_below[vocab_size] = _are_below(token_ids, vocab_size)
    return token_ids.are_below[vocab_size]


def _are_below(token_ids: Sequence[int], vocab_size: int) -> bool:
    try:
        ids = array("I", tuple(token_ids))  # a plain tuple: for other sequences `array` makes a call per item
        return int(np.frombuffer(ids, dtype=np.uintc).max()) < vocab_size
    except OverflowError:
        return False
