"""A draft model on one rank: any model that Baton serves, with a KV cache of its own."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from kvtransfer.reshard import rank_block_bytes
from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.opening import open_model
from workers.attention.registry import attention_for
from workers.batch import Batch, StepOutput
from workers.config import WorkerConfig
from workers.kv.kinds import layout_of
from workers.kv.storage import KVStorage
from workers.memory import free_ram_bytes
from workers.models.config import weight_bytes
from workers.models.interface import ServedConfig
from workers.models.served import check_ranks, load_served, read_served
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader
from workers.runner.runner import TorchRunner
from workers.speculation.base import HiddenStates, Proposer
from workers.speculation.draft_model import DraftLimits, DraftModelProposer

log = logging.getLogger("baton.worker")

_SETTING = "speculate"
_CHOOSE = "choose a draft model with the same vocabulary, as a smaller one of the same family"


class ServedDraftModel:
    """Reads the checkpoint `path`. Raises BadCheckpoint, UnsupportedModel, or Misconfigured for a model with another
    vocabulary, one that the ranks cannot share, or one for which there is too little memory."""

    def __init__(
        self, path: str, config: WorkerConfig, target: ServedConfig, group: TensorParallel, device: str
    ) -> None:
        model = read_served(path)
        check_same_vocabulary(path, model, config.model, target)
        check_ranks(model, config.tp, _SETTING, expert_parallel=config.expert_parallel)
        dtype = "float32" if "float32" in (config.dtype, model.dtype) and config.dtype != "bfloat16" else "bfloat16"
        if device == "cpu":
            _check_fits(path, weight_bytes(path, dtype) // config.tp, free_ram_bytes())
        self._layout = layout_of(model, "auto", block_size=config.block_size, dtype=dtype, tp=config.tp)
        self._config = config
        self._vocab_size = min(model.vocab_size, target.vocab_size)
        self._max_len = model.max_model_len
        self._device = device
        self._scratch_pages = 1 - -config.max_drafts // config.block_size
        self._decoder = load_served(
            path,
            device=device,
            dtype=dtype,
            quantize="off",
            parallel=group,
            expert_parallel=config.expert_parallel,
            on_progress=None,
        )
        self._runner: TorchRunner | None = None
        self._num_pages = 0
        log.info("drafts of next tokens come from %s: %s", path, self._decoder.stored_as)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def kv_head(self) -> None:
        """A draft model computes what it lacks from the tokens."""

    @property
    def storage(self) -> None:
        """Its cache stays where it is."""

    def read_from(self, hidden: HiddenStates[torch.Tensor]) -> None: ...

    @property
    def page_bytes(self) -> int:
        return rank_block_bytes(self._layout)

    @property
    def scratch_bytes(self) -> int:
        return self._num_scratch * self.page_bytes

    def make_storage(self, num_pages: int) -> None:
        self._num_pages = num_pages
        storage = KVStorage(self._layout, num_blocks=num_pages + self._num_scratch, device=self._device)
        self._runner = TorchRunner(self._decoder, attention_for(storage), block_size=self._config.block_size)

    def draft(self, batch: Batch) -> StepOutput:
        """Computes a step of the draft model. Only rank 0's output has tokens."""
        assert self._runner is not None, "the draft model has no cache yet"
        return self._runner.run(batch)

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        limits = DraftLimits(
            block_size=self._config.block_size,
            num_pages=self._num_pages,
            scratch_pages=self._scratch_pages,
            chunk=self._config.max_num_batched_tokens,
            max_len=self._max_len,
            vocab_size=self._vocab_size,
        )
        return DraftModelProposer(leader.everywhere(self), limits, clock=time.perf_counter)

    @property
    def _num_scratch(self) -> int:
        return self._config.max_num_seqs * self._scratch_pages


def _check_fits(path: str, num_bytes: int, free_bytes: int) -> None:
    if num_bytes > free_bytes:
        raise Misconfigured(
            f"speculate: the weights of the draft model {path} take {num_bytes / 2**30:.2f} GiB on each rank, "
            f"{free_bytes / 2**30:.2f} GiB are free beside the model: choose a smaller one, or raise tp",
            param=_SETTING,
        )


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
