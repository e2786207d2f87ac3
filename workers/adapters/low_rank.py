"""An adapter's update of a linear layer: y += s B (A x), for the rows of a step that have one
(https://arxiv.org/abs/2106.09685).

    step's rows   base  base  a  a  b             the layer's product: of all rows at once, as without adapters
                              └─ s B_a (A_a x)    added to the rows of each adapter alone

A base row has the bits that it has in a step without adapters, and a row of an adapter those that it has alone: A and B
are packed like the layer's own weight, whose products do not depend on other rows (`workers.kernels.cpu.products`).

Legend: T tokens, I inputs and O outputs of this rank, R rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.weights.encoding import Matrix
from workers.weights.formats.float_matrix import FloatMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTokens:
    """The tokens of a step that belong to rows of one adapter: their places, int64, or None for all tokens."""

    adapter_id: str
    places_T: torch.Tensor | None


class StepAdapters:
    """The adapters of the step that is computed, as every layer of a decoder sees them. The decoder sets `tokens`
    before the layers; it is empty for a step without adapters."""

    def __init__(self) -> None:
        self.tokens: Sequence[AdapterTokens] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPart:
    """B of one projection, times the scale, for the layer's `outputs`; `ranks`: its rows of the layer's A."""

    ranks: slice
    outputs: slice
    up_OR: FloatMatrix


class LowRankUpdate:
    """One adapter's part of a linear layer on this rank, with one A for all projections."""

    def __init__(self, down_RI: FloatMatrix, parts: Sequence[LowRankPart]) -> None:
        self._down_RI = down_RI
        self._parts = tuple(parts)

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Adds s B (A x) to `y_TO`, in place."""
        inner_TR = self._down_RI(x_TI)
        for part in self._parts:
            y_TO[:, part.outputs] += part.up_OR(inner_TR[:, part.ranks])


class LinearAdapters:
    """The adapters of one linear layer, by id; `updates` has only those that change the layer."""

    def __init__(self, step: StepAdapters) -> None:
        self._step = step
        self.updates: dict[str, LowRankUpdate] = {}

    def here(self) -> list[tuple[LowRankUpdate, torch.Tensor | None]]:
        """The updates of the present step, with the places of their tokens."""
        if not self._step.tokens:
            return []
        updates = ((self.updates.get(rows.adapter_id), rows.places_T) for rows in self._step.tokens)
        return [(update, places_T) for update, places_T in updates if update is not None]

    def product(self, x_TI: torch.Tensor, weight: Matrix, bias_O: torch.Tensor | None) -> torch.Tensor:
        """The layer's product [T, O], with what adapters add."""
        y_TO = weight(x_TI, bias_O)
        for update, places_T in self.here():
            if places_T is None:
                update.add(x_TI, y_TO)
            else:
                adapted_TO = y_TO[places_T]
                update.add(x_TI[places_T], adapted_TO)
                y_TO[places_T] = adapted_TO
        return y_TO

    def gated(
        self,
        x_TI: torch.Tensor,
        weight: Matrix,
        bias_O: torch.Tensor | None,
        silu_mul: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The product and its gate, [T, O / 2]; updates are added before the gate. Rows with adapters are multiplied
        separately, so that others are computed as in a step without adapters."""
        updates = self.here()
        if not updates:
            return weight(x_TI, bias_O)
        if len(updates) == 1 and updates[0][1] is None:
            y_TO = weight.before_gate(x_TI, bias_O)
            updates[0][0].add(x_TI, y_TO)
            return silu_mul(y_TO)
        places = [places_T for _, places_T in updates if places_T is not None]
        adapted_T = torch.cat(places)
        out_TF = weight(x_TI, bias_O) if len(adapted_T) < len(x_TI) else None
        x_TI = x_TI[adapted_T]
        y_TO = weight.before_gate(x_TI, bias_O)
        start = 0
        for (update, _), places_T in zip(updates, places, strict=True):
            stop = start + len(places_T)
            update.add(x_TI[start:stop], y_TO[start:stop])
            start = stop
        adapted_TF = silu_mul(y_TO)
        out_TF = torch.empty_like(adapted_TF) if out_TF is None else out_TF
        out_TF[adapted_T] = adapted_TF
        return out_TF
