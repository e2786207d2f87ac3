"""A weight and the product with it: as the checkpoint has it, or packed as this machine reads it fastest.

Packed, a product reads each weight once, in order, and no step lays anything out anew. On processors with AMX the
layout and the product are ours (`workers.kernels.cpu.products`), on other CPUs oneDNN's.

Legend: T tokens, I inputs, O outputs, F half of them: those of a gate and as many to be multiplied with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workers.kernels.base import Kernels
from workers.kernels.cpu.products import TiledWeight, can_tile


class Matrix:
    """y = x W^T (+ b). `weight_OI` is the weight until `pack`; it may be shared with others, who keep it."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._weight_OI: torch.Tensor | None = weight_OI
        self._onednn: torch.Tensor | None = None
        self._tiled: TiledWeight | None = None
        self._num_outputs = weight_OI.shape[0]

    @property
    def packed(self) -> bool:
        return self._weight_OI is None

    @property
    def weight_OI(self) -> torch.Tensor:
        """Only before `pack`: afterwards its memory is the packed one's."""
        assert self._weight_OI is not None, "packed weights cannot be read back"
        return self._weight_OI

    @property
    def tiled(self) -> TiledWeight | None:
        """The weight, once it is packed for tiles."""
        return self._tiled

    def pack(self) -> None:
        """Once the weight is loaded, and for good. Does nothing where the machine has nothing to gain."""
        if self._weight_OI is None:
            return
        if can_tile(self._weight_OI):
            self._tiled = TiledWeight(self._weight_OI)
        elif _onednn_packs(self._weight_OI):
            self._onednn = torch.ops.mkldnn._reorder_linear_weight(self._weight_OI)
        else:
            return
        self._weight_OI = None

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._tiled is not None:
            return self._tiled(x_TI, bias_O)
        if self._onednn is None:
            return F.linear(x_TI, self.weight_OI, bias_O)
        if x_TI.shape[0] == 0:  # a chunk in the middle of a prompt asks for no logits, and oneDNN refuses to make none
            return x_TI.new_empty(0, self._num_outputs)
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._onednn, bias_O, "none", [], "")
        return y_TO


class GatedMatrix(Matrix):
    """silu(gate) * up, [T, F], of a product [T, 2 F] whose first half is the gate: in one pass where there is one."""

    def __init__(self, weight_OI: torch.Tensor, kernels: Kernels) -> None:
        super().__init__(weight_OI)
        self._kernels = kernels

    def pack(self) -> None:
        if self._weight_OI is not None and can_tile(self._weight_OI):
            self._tiled = TiledWeight(self._weight_OI, gated=True)
            self._weight_OI = None
        super().pack()

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = super().__call__(x_TI, bias_O)
        return y_TO if self._tiled is not None else self._kernels.silu_mul(y_TO)


def _onednn_packs(weight_OI: torch.Tensor) -> bool:
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32
