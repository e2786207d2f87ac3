"""Computes drafts on every rank of a worker (docs/adr/0057)."""

from __future__ import annotations

from typing import Protocol

import torch

from protos.values import KVHead
from workers.kv.kv_storage import KVStorage
from workers.parallel.ranks import Leader
from workers.speculation.proposer import HiddenStates, Proposer
from workers.speculation.ranks.draft_cache import DraftCache


class Drafting(Protocol):
    """One rank's part of a proposer that computes with a model. It is an object of operations that all ranks do
    (`workers.parallel.operations.DraftOperations`)."""

    @property
    def cache(self) -> DraftCache | None:
        """The proposer's own KV on this rank; None if it keeps none."""
        ...

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the proposer reads; none if it reads tokens only."""
        ...

    @property
    def kv_head(self) -> KVHead | None:
        """The KV that goes with the model's to other workers and to the host; None if there is none."""
        ...

    def read_from(self, hidden: HiddenStates[torch.Tensor]) -> None: ...

    def make_storage(self, num_pages: int) -> None:
        """Makes the proposer's KV cache for a pool of so many pages. Raises torch's own error if memory runs out."""
        ...

    @property
    def storage(self) -> KVStorage | None: ...

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        """On rank 0, once there is storage: the proposer, whose computation all ranks do. `headless` as in
        `BlockPool`."""
        ...
