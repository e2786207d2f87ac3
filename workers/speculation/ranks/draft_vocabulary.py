"""Whether a draft model has the target's vocabulary. Without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.opening import open_model
from workers.models.interface import ServedConfig

_SETTING = "speculate"
_CHOOSE = "choose a draft model with the same vocabulary, as a smaller one of the same family"


def check_same_vocabulary(
    draft_path: str | Path, draft: ServedConfig, target_path: str | Path, target: ServedConfig
) -> None:
    """Raises Misconfigured unless a token id is the same text for both models. Where one of them has no tokenizer, the
    numbers of tokens are compared; with both, a vocabulary may be padded."""
    theirs, ours = _tokens(draft_path), _tokens(target_path)
    if theirs is None or ours is None:
        if draft.vocab_size != target.vocab_size:
            raise Misconfigured(
                f"speculate: the draft model {draft_path} has {draft.vocab_size} tokens, {target_path} has "
                f"{target.vocab_size}: {_CHOOSE}",
                param=_SETTING,
            )
        return
    shared = min(draft.vocab_size, target.vocab_size)
    for token_id in sorted(one for one in theirs.keys() | ours.keys() if one < shared):
        if theirs.get(token_id) != ours.get(token_id):
            raise Misconfigured(
                f"speculate: token {token_id} is {theirs.get(token_id)!r} for the draft model {draft_path} and "
                f"{ours.get(token_id)!r} for {target_path}: {_CHOOSE}",
                param=_SETTING,
            )


def _tokens(path: str | Path) -> dict[int, str] | None:
    """The text of each token in tokenizer.json, special ones left out: chats of one vocabulary may name them anew.
    None without the file. Raises BadCheckpoint if it is damaged."""
    text = open_model(path).text("tokenizer.json")
    if text is None:
        return None
    try:
        content: dict[str, Any] = json.loads(text)
        added = {one["id"] for one in content.get("added_tokens") or ()}
        vocab = content.get("model", {}).get("vocab")
        if isinstance(vocab, dict):
            return {int(number): token for token, number in vocab.items() if number not in added}
        return {number: one[0] for number, one in enumerate(vocab or ()) if number not in added}
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
        raise BadCheckpoint(
            f"speculate: tokenizer.json of {path} cannot be read ({type(error).__name__}: {error}): download it again"
        ) from error
