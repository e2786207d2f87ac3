"""The vocabulary, cut over the ranks: token ids to vectors, and vectors to logits.

Legend: T tokens, E hidden size, V vocabulary, R positions whose logits are asked for. A vocabulary that the ranks
cannot share evenly is padded at its end; nobody sees the padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from workers.models.layers.matrix import Matrix
from workers.models.layers.slots import Place, Slot


class VocabParallel:
    """One [V, E] tensor of the checkpoint. `embed` and `logits` may share it: tied embeddings."""

    def __init__(self, place: Place, name: str, vocab_size: int, hidden_size: int) -> None:
        self._name = name
        self._parallel = place.parallel
        self._kernels = place.kernels
        self._shape = (vocab_size, hidden_size)
        share = -(-vocab_size // place.parallel.size)
        self._start = min(place.parallel.rank * share, vocab_size)
        self._stop = min(self._start + share, vocab_size)
        self.weight_VE = place.zeros(share, hidden_size)
        self._matrix = Matrix(self.weight_VE)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, E]. Each rank looks up the ids it holds; the others' rows are zero until all are added up."""
        if self._parallel.size == 1:
            return F.embedding(token_ids_T, self.weight_VE)
        return self._parallel.all_reduce(self._kernels.embed(token_ids_T, self.weight_VE, self._start))

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """[R, V] in float32, on every rank."""
        return self._kernels.join(self._parallel.collect(self._matrix(x_RE)), self._shape[0])

    def pack(self, *, embeds: bool) -> None:
        """For `logits`. `embed` needs the rows as they are: a tensor that does both is held twice."""
        self._matrix.pack()
        if not embeds and self._matrix.packed:
            self.weight_VE = self.weight_VE.new_empty(0, self._shape[1])

    def slots(self) -> Iterator[Slot]:
        target = self.weight_VE[: self._stop - self._start]
        yield Slot(name=f"{self._name}.weight", shape=self._shape, target=target, start=self._start)
