"""The seam between a head that drafts and what runs it.

Legend: T tokens of a step, E hidden size of the head, R positions whose logits are asked for, V tokens of its own head.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch

from protos.values import KVLayout
from workers.attention.backend import AttentionBackend
from workers.models.decoder import ModelInputs
from workers.models.filling import LoadPart, PartLoader, check_slots, ignore_progress, log_unused
from workers.speculation.proposer import HiddenStates
from workers.weights.slots import Loadable
from workers.weights.source import WeightSource


class DraftHead(Protocol):
    """A head with its own attention and KV. The entry of position p is made from the target's result at p and the next
    token, and predicts the token after that."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads; the number of layers stands for the last norm's output."""
        ...

    @property
    def max_len(self) -> int: ...

    @property
    def target_ids_V(self) -> torch.Tensor | None:
        """int64: the target's id of each of the head's tokens; None if ids are equal."""
        ...

    def kv_layout(self, block_size: int) -> KVLayout: ...

    def features(self, hidden: HiddenStates[torch.Tensor], places_T: torch.Tensor) -> torch.Tensor:
        """[T, E]: the features of the target's hidden states at these places of the last step."""
        ...

    def forward(
        self, inputs: ModelInputs, features_TE: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [R, V] in float32, and features [R, E] for the entry after each position. Every rank must get
        the same inputs."""
        ...


def fill_head(path: str, head: Loadable, source: WeightSource, *, unused: Collection[str] = ()) -> None:
    """Fills the head's slots, and logs tensors that are neither wanted nor in `unused`. Raises as `check_slots`."""
    slots = list(head.slots())
    check_slots(path, slots, source)
    log_unused(path, sorted({*source.names()} - {slot.name for slot in slots} - {*unused}))
    PartLoader(Path(path), source).load([LoadPart(slots=head.slots)], ignore_progress, num_threads=1)
