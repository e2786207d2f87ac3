"""An encoding of float weights that shows each linear layer's inputs to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

from workers.kernels.cpu.products import PackedWeight
from workers.weights.encoding import LayerContext, Matrix, WeightEncoding, WeightShare
from workers.weights.formats.float_matrix import FLOAT_ENCODING
from workers.weights.slots import Slot


class InputObserver(Protocol):
    def add(self, x_TI: torch.Tensor) -> None: ...


AnyObserver = TypeVar("AnyObserver", bound=InputObserver)


class ObservedFloats(Generic[AnyObserver]):
    """`observers` are by the names of the projections that have an input in common. They see nothing once `done`."""

    def __init__(self, make: Callable[[int], AnyObserver]) -> None:
        self._make = make
        self.observers: dict[tuple[str, ...], AnyObserver] = {}
        self._done = False

    def encoding_of(self, name: str) -> WeightEncoding:
        return self

    def done(self) -> None:
        self._done = True

    def matrix(self, context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
        observer = self._make(share.num_inputs)
        self.observers[tuple(projection.name for projection in share.projections)] = observer

        def observe(x_TI: torch.Tensor) -> None:
            if not self._done:
                observer.add(x_TI)

        return _ObservedMatrix(FLOAT_ENCODING.matrix(context, share, gated=gated), observe)


class _ObservedMatrix:
    def __init__(self, matrix: Matrix, observe: Callable[[torch.Tensor], None]) -> None:
        self._matrix = matrix
        self._observe = observe

    @property
    def packed_weight(self) -> PackedWeight | None:
        return None

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        self._observe(x_TI)
        return self._matrix(x_TI, bias_O)

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return self._matrix.before_gate(x_TI, bias_O)

    def pack(self) -> None:
        """Stays as loaded: the weight is replaced by its rounded one."""

    def dequantised(self) -> torch.Tensor:
        return self._matrix.dequantised()

    def slots(self) -> Iterator[Slot]:
        return self._matrix.slots()
