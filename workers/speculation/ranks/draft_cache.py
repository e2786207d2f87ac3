"""The KV cache of a proposer on one rank: a page for each page of the worker's pool, and scratch pages."""

from __future__ import annotations

import torch

from kvtransfer.reshard import rank_block_bytes
from protos.values import KVHead, KVLayout
from workers.kv.kv_storage import KVStorage
from workers.parallel.ranks import Leader
from workers.speculation.proposer import HiddenStates, Proposer
from workers.speculation.proposers.draft_model_proposer import DraftLimits
from workers.worker_config import WorkerConfig


class DraftCache:
    """Scratch pages follow those of the pool, some for each sequence of a step, for drafts beyond a block table."""

    def __init__(self, layout: KVLayout, config: WorkerConfig, device: str) -> None:
        self.layout = layout
        self._config = config
        self._device = device
        self._scratch_pages = 1 - -config.max_drafts // config.block_size
        self._num_pages = 0

    @property
    def page_bytes(self) -> int:
        return rank_block_bytes(self.layout)

    @property
    def scratch_bytes(self) -> int:
        return self._num_scratch * self.page_bytes

    def make(self, num_pages: int) -> KVStorage:
        """The storage for a pool of so many pages. Raises torch's own error if memory runs out."""
        self._num_pages = num_pages
        return KVStorage(self.layout, num_blocks=num_pages + self._num_scratch, device=self._device)

    def limits(self, *, max_len: int, vocab_size: int) -> DraftLimits:
        return DraftLimits(
            block_size=self._config.block_size,
            num_pages=self._num_pages,
            scratch_pages=self._scratch_pages,
            chunk=self._config.max_num_batched_tokens,
            max_len=max_len,
            vocab_size=vocab_size,
        )

    @property
    def _num_scratch(self) -> int:
        return self._config.max_num_seqs * self._scratch_pages


class Drafting:
    """One rank's part of a proposer that computes with a model. All ranks run its operations
    (`workers.parallel.operations.DraftOperations`)."""

    cache: DraftCache | None = None  # the proposer's own KV on this rank
    hidden_layers: tuple[int, ...] = ()  # of the target, whose inputs the proposer reads
    kv_head: KVHead | None = None  # KV that goes with the model's to other workers and to the host
    storage: KVStorage | None = None
    hidden: HiddenStates[torch.Tensor] | None = None

    def make_storage(self, num_pages: int) -> None:
        """Makes the proposer's KV cache for a pool of so many pages. Raises torch's own error if memory runs out."""

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        """On rank 0, once there is storage: the proposer, whose computation all ranks do. `headless` as in
        `BlockPool`."""
        raise NotImplementedError
