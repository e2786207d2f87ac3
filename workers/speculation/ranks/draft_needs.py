"""Checks a draft model or head by its files, and what it needs, before anything is loaded. Without torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.opening import open_model
from protos.values import ITEM_BYTES
from workers.models.interface import ServedConfig
from workers.models.model_config import ModelConfig, mtp_bytes, weight_bytes
from workers.models.served import check_ranks, layout_of, read_served
from workers.speculation.heads.eagle_config import eagle_name, read_eagle
from workers.speculation.heads.head_files import open_head
from workers.speculation.registry import SpeculateMode
from workers.weights.source import FLOATS, StoredTensor
from workers.worker_config import WorkerConfig

_SETTING = "speculate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """The least memory of a worker's proposer over all ranks. `block_bytes`: its KV for each block of the model."""

    weight_bytes: int = 0
    block_bytes: int = 0


def needs_of(config: WorkerConfig, target: ServedConfig, dtype: str) -> DraftNeeds:
    """`dtype`: the target's. Reads descriptions of tensors only. Raises BadCheckpoint, UnsupportedModel or
    Misconfigured for files that fit no draft model or head of this target."""
    mode = SpeculateMode.of(config.speculate)
    if not mode.is_by_model:
        return DraftNeeds()
    try:
        if mode.path and not Path(mode.path).exists():
            raise BadCheckpoint(f"there is no {mode.path}: give the folder of a draft model or head")
        return _needs(mode, config, target, dtype)
    except Misconfigured as error:
        raise type(error)(f"worker.speculate is {config.speculate}: {error.message}", param=_SETTING) from error


def _needs(mode: SpeculateMode, config: WorkerConfig, target: ServedConfig, dtype: str) -> DraftNeeds:
    if mode.kind == "model":
        return _of_draft_model(config, target, mode.path)
    if not isinstance(target, ModelConfig):
        raise Misconfigured(
            f"a decoder of transformers ({target.family}) shows no hidden states: choose model:PATH, ngram or suffix"
        )
    if mode.kind == "mtp":
        if not target.num_mtp_layers:
            raise Misconfigured(f"{config.model} has no layers for multi-token prediction: choose other drafts")
        layout = layout_of(target, "auto", block_size=config.block_size, dtype=dtype, tp=config.tp)
        return DraftNeeds(
            weight_bytes=mtp_bytes(config.model, target, dtype), block_bytes=layout.block_bytes // target.num_layers
        )
    with open_head(mode.path, eagle_name, framework="numpy") as source:
        stored = [source.describe(name) for name in source.names()]
        block_bytes = 0
        if mode.kind == "eagle":
            head = read_eagle(mode.path, target, source).model
            block_bytes = head.kv_layout(block_size=config.block_size, dtype=dtype, tp=config.tp).block_bytes
    copies = config.tp if mode.kind == "medusa" else 1  # every rank has all of Medusa's
    return DraftNeeds(weight_bytes=copies * _converted_bytes(stored, dtype), block_bytes=block_bytes)


def check_fits(config: WorkerConfig, needs: DraftNeeds, free_bytes: int) -> None:
    """Raises Misconfigured unless a rank's share of the weights fits into its free memory."""
    num_bytes = needs.weight_bytes // config.tp
    if num_bytes > free_bytes:
        raise Misconfigured(
            f"speculate is {config.speculate}: its weights take {num_bytes / 2**30:.2f} GiB on each rank, "
            f"{free_bytes / 2**30:.2f} GiB are free: choose a smaller one, or raise tp",
            param=_SETTING,
        )


def draft_dtype(config: WorkerConfig, model: ServedConfig) -> str:
    """In which a draft model computes."""
    return "float32" if "float32" in (config.dtype, model.dtype) and config.dtype != "bfloat16" else "bfloat16"


def _of_draft_model(config: WorkerConfig, target: ServedConfig, path: str) -> DraftNeeds:
    model = read_served(path)
    check_same_vocabulary(path, model, config.model, target)
    check_ranks(model, config.tp, _SETTING, expert_parallel=config.expert_parallel)
    dtype = draft_dtype(config, model)
    layout = layout_of(model, "auto", block_size=config.block_size, dtype=dtype, tp=config.tp)
    return DraftNeeds(weight_bytes=weight_bytes(path, dtype), block_bytes=layout.block_bytes)


def _converted_bytes(tensors: Collection[StoredTensor], dtype: str) -> int:
    item = ITEM_BYTES.get(dtype, 2)
    return sum([prod(each.shape) * item if each.dtype in FLOATS else each.num_bytes for each in tensors])


_CHOOSE = "choose a draft model with the same vocabulary, as a smaller one of the same family"


def check_same_vocabulary(
    draft_path: str | Path, draft: ServedConfig, target_path: str | Path, target: ServedConfig
) -> None:
    """Raises Misconfigured unless a token id is the same text for both models. With both tokenizers a vocabulary may be
    padded; without one of them the numbers of tokens are compared."""
    theirs, ours = _tokens(draft_path), _tokens(target_path)
    if theirs is None or ours is None:
        if draft.vocab_size != target.vocab_size:
            raise Misconfigured(
                f"{draft_path} has {draft.vocab_size} tokens, {target_path} has {target.vocab_size}: {_CHOOSE}",
                param=_SETTING,
            )
        return
    shared = min(draft.vocab_size, target.vocab_size)
    for token_id in sorted(each for each in theirs.keys() | ours.keys() if each < shared):
        if theirs.get(token_id) != ours.get(token_id):
            raise Misconfigured(
                f"token {token_id} is {theirs.get(token_id)!r} for {draft_path}, {ours.get(token_id)!r} for the "
                f"model: {_CHOOSE}",
                param=_SETTING,
            )


def _tokens(path: str | Path) -> dict[int, str] | None:
    """The text of each token in tokenizer.json without special tokens, which chat models may rename. None without the
    file. Raises BadCheckpoint if it is damaged."""
    text = open_model(path).text("tokenizer.json")
    if text is None:
        return None
    try:
        content: dict[str, Any] = json.loads(text)
        added = {each["id"] for each in content.get("added_tokens") or ()}
        vocab = content.get("model", {}).get("vocab")
        if isinstance(vocab, dict):
            return {int(number): token for token, number in vocab.items() if number not in added}
        return {number: each[0] for number, each in enumerate(vocab or ()) if number not in added}
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
        raise BadCheckpoint(f"tokenizer.json of {path} cannot be read ({error!r}): download it again") from error
