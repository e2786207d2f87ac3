"""The vocabulary, cut over the ranks: token ids to vectors, and vectors to logits.

Legend: T tokens, E hidden size, V vocabulary, R positions whose logits are asked for. A vocabulary that the ranks
cannot share evenly is padded at its end; `Head.logits` drops the padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from workers.kernels.cpu.products import PackedRows
from workers.weights.encoding import EmbeddingTable, LayerContext, Matrix, Projection, TableEncoding, WeightShare
from workers.weights.formats.float_matrix import FloatMatrix
from workers.weights.slots import Slot


class Embedding:
    """The checkpoint's tensor `NAME.weight` [V, E], in floating point or as a table that stays in its encoding."""

    def __init__(
        self, context: LayerContext, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        self._parallel = context.parallel
        self._kernels = context.kernels
        self._shape = (vocab_size, hidden_size)
        self._rows, share = _rows_of_rank(context, vocab_size)
        self._scale = torch.tensor(scale, dtype=context.dtype).item()
        self.name = name
        self.weight_VE: torch.Tensor | None = None
        self._table: EmbeddingTable | None = None
        self._packed: PackedRows | None = None
        encoding = context.encodings(name)
        if isinstance(encoding, TableEncoding):
            self._table = encoding.table(context, _share_of_rows(context, name, vocab_size, hidden_size))
        else:
            self.weight_VE = context.zeros(share, hidden_size)

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, E], times the scale, which is rounded to their type first."""
        rows_TE = self._rows_of(token_ids_T)
        return rows_TE if self._scale == 1.0 else rows_TE * self._scale

    def _rows_of(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the ids it holds; its rows for the others are zero until all are added up."""
        if self._parallel.size == 1:
            return self._looked_up(token_ids_T)
        if self.weight_VE is not None:
            return self._parallel.all_reduce(self._kernels.embed(token_ids_T, self.weight_VE, self._rows.start))
        foreign_T = (token_ids_T < self._rows.start) | (token_ids_T >= self._rows.stop)
        rows_TE = self._looked_up((token_ids_T - self._rows.start).masked_fill(foreign_T, 0))
        return self._parallel.all_reduce(rows_TE.masked_fill(foreign_T.unsqueeze(1), 0))

    def _looked_up(self, rows_T: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.rows(rows_T)
        if self.weight_VE is not None:
            return F.embedding(rows_T, self.weight_VE)
        assert self._table is not None
        return self._table(rows_T)

    def product(self) -> Matrix:
        if self.weight_VE is not None:
            return FloatMatrix(self.weight_VE)
        assert self._table is not None
        return self._table.product()

    def read_from(self, packed: PackedRows) -> None:
        """From now on in the head's packed weight: frees its own."""
        self._packed, self.weight_VE, self._table = packed, None, None

    def slots(self) -> Iterator[Slot]:
        if self.weight_VE is None:
            assert self._table is not None
            yield from self._table.slots()
        else:
            target = self.weight_VE[: len(self._rows)]
            yield Slot(name=f"{self.name}.weight", shape=self._shape, target=target, start=self._rows.start)


class Head:
    """Logits by the checkpoint's `lm_head`, or, tied, by an embedding's weight, from which rows are then read."""

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        self._scale, self._softcap = scale, softcap
        self._parallel = context.parallel
        self._kernels = context.kernels
        self._vocab_size = vocab_size
        self._tied = tied
        if tied is not None:
            self._weight = tied.product()
        else:
            self._weight = context.matrix(_share_of_rows(context, "lm_head", vocab_size, hidden_size))

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """[R, V] in float32, on every rank."""
        logits_RV = self._kernels.join(self._parallel.collect(self._weight(x_RE)), self._vocab_size)
        if self._scale != 1.0:
            logits_RV = logits_RV * self._scale
        return torch.tanh(logits_RV / self._softcap) * self._softcap if self._softcap else logits_RV

    def pack(self) -> None:
        self._weight.pack()
        packed = self._weight.packed_weight
        if self._tied is not None and isinstance(packed, PackedRows):
            self._tied.read_from(packed)

    def slots(self) -> Iterator[Slot]:
        return self._weight.slots() if self._tied is None else iter(())


def _share_of_rows(context: LayerContext, name: str, vocab_size: int, hidden_size: int) -> WeightShare:
    rows, share = _rows_of_rank(context, vocab_size)
    return WeightShare(
        projections=(Projection(name=name, total=vocab_size, start=rows.start, size=len(rows)),),
        total_inputs=hidden_size,
        first_input=0,
        num_inputs=hidden_size,
        padding=share - len(rows),
    )


def _rows_of_rank(context: LayerContext, vocab_size: int) -> tuple[range, int]:
    share = -(-vocab_size // context.parallel.size)
    start = min(context.parallel.rank * share, vocab_size)
    return range(start, min(start + share, vocab_size)), share
