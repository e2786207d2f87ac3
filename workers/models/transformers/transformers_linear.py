"""A linear layer of a transformers model, with its weight in a matrix of Baton's: in any of its encodings, packed for
this machine, and cut over the ranks.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.weights.encoding import LayerContext, Projection, WeightShare
from workers.weights.slots import Slot

COLUMNS, COLUMNS_GATHERED = ("colwise",), ("colwise_gather_output", "colwise_rep")
PACKED_COLUMNS = ("packed_colwise",)
ROWS, ROWS_OF_WHOLE = ("rowwise",), ("rowwise_split_input", "rowwise_rep")


class MatrixLinear(torch.nn.Module):
    """y = x W^T + b. `style` is transformers' word for how the ranks share it, "" if each has all of it."""

    def __init__(
        self, context: LayerContext, name: str, num_inputs: int, num_outputs: int, *, bias: bool, style: str
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = num_inputs, num_outputs
        self._parallel = context.parallel
        tp, rank = context.parallel.size, context.parallel.rank
        cuts_outputs = tp > 1 and style in COLUMNS + COLUMNS_GATHERED + PACKED_COLUMNS
        self._cuts_inputs = tp > 1 and style in ROWS + ROWS_OF_WHOLE
        self._num_inputs = num_inputs // tp if self._cuts_inputs else num_inputs
        self._gathers = cuts_outputs and style in COLUMNS_GATHERED
        self._splits = self._cuts_inputs and style in ROWS_OF_WHOLE
        halves = 2 if cuts_outputs and style in PACKED_COLUMNS else 1
        size = num_outputs // halves // (tp if cuts_outputs else 1)
        first = rank * size if cuts_outputs else 0
        self._projections = tuple(
            Projection(name=name, total=num_outputs, start=half * num_outputs // halves + first, size=size)
            for half in range(halves)
        )
        share = WeightShare(
            projections=self._projections,
            total_inputs=num_inputs,
            first_input=rank * self._num_inputs if self._cuts_inputs else 0,
            num_inputs=self._num_inputs,
        )
        self._matrix = context.matrix(share)
        self._bias_O = context.empty(halves * size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._splits:
            x = x.chunk(self._parallel.size, dim=-1)[self._parallel.rank]
        x_TI = x.reshape(-1, x.shape[-1])
        if self._cuts_inputs:
            y_TO = self._parallel.all_reduce(self._matrix(x_TI))
            y_TO = y_TO if self._bias_O is None else y_TO + self._bias_O
        else:
            y_TO = self._matrix(x_TI, self._bias_O)
        if self._gathers:
            y_TO = self._parallel.all_gather(y_TO)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def pack(self) -> None:
        self._matrix.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._matrix.slots()
        if self._bias_O is None:
            return
        sizes = [projection.size for projection in self._projections]
        for part, target in zip(self._projections, torch.split(self._bias_O, sizes), strict=True):
            yield Slot(name=f"{part.name}.bias", shape=(part.total,), target=target, start=part.start)
