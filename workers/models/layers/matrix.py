"""A weight and the product with it: as the checkpoint has it, or packed into the layout that oneDNN's kernels read.

Packed, a product reads each weight once, in order, and no step lays anything out anew: 1.2 to 1.8 times the rate of
the plain layout for batches of 1 to 64 rows (docs/performance.md). Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Matrix:
    """y = x W^T (+ b). `weight_OI` is the weight until `pack`; it may be shared with others, who keep it."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._weight_OI: torch.Tensor | None = weight_OI
        self._packed: torch.Tensor | None = None
        self._num_outputs = weight_OI.shape[0]

    @property
    def packed(self) -> bool:
        return self._packed is not None

    @property
    def weight_OI(self) -> torch.Tensor:
        """Only before `pack`: afterwards its memory is the packed one's."""
        assert self._weight_OI is not None, "packed weights cannot be read back"
        return self._weight_OI

    def pack(self) -> None:
        """Once the weight is loaded, and for good. Does nothing where the machine has nothing to gain."""
        if self._weight_OI is not None and _can_pack(self._weight_OI):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight_OI)
            self._weight_OI = None

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x_TI, self.weight_OI, bias_O)
        if x_TI.shape[0] == 0:  # a chunk in the middle of a prompt asks for no logits, and oneDNN refuses to make none
            return x_TI.new_empty(0, self._num_outputs)
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, bias_O, "none", [], "")
        return y_TO


def _can_pack(weight_OI: torch.Tensor) -> bool:
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32
