"""Floating-point weights: multiplied with as the checkpoint has them, or packed as this machine reads them fastest.

Legend: T tokens, I inputs, O outputs, F half of them: those of a gate and as many to be multiplied with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from workers.kernels.cpu.products import PackedFloats, can_pack
from workers.kernels.device_kernels import Kernels
from workers.weights.encoding import LayerContext, Matrix, WeightEncoding, WeightShare
from workers.weights.slots import Slot


class FloatMatrix:
    """`weight_OI` is the weight until `pack`. Without slots it is another layer's, which keeps it."""

    def __init__(self, weight_OI: torch.Tensor, slots: Sequence[Slot] = ()) -> None:
        self._slots = tuple(slots)
        self._weight_OI: torch.Tensor | None = weight_OI
        self._onednn: torch.Tensor | None = None
        self._packed: PackedFloats | None = None
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
    def packed_weight(self) -> PackedFloats | None:
        return self._packed

    def pack(self) -> None:
        """Once the weight is loaded, and for good. Does nothing where the machine has nothing to gain."""
        if self._weight_OI is None:
            return
        if can_pack(self._weight_OI):
            self._packed = PackedFloats(self._weight_OI)
        elif _onednn_packs(self._weight_OI):
            self._onednn = torch.ops.mkldnn._reorder_linear_weight(self._weight_OI)
        else:
            return
        self._release()

    def dequantised(self) -> torch.Tensor:
        return self.weight_OI

    def slots(self) -> Iterator[Slot]:
        assert self._weight_OI is not None, "packed weights cannot be read back"
        yield from self._slots

    def _release(self) -> None:
        self._weight_OI = None
        self._slots = ()

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return self.before_gate(x_TI, bias_O)

    def before_gate(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.before_gate(x_TI, bias_O)
        if self._onednn is None:
            return F.linear(x_TI, self.weight_OI, bias_O)
        if x_TI.shape[0] == 0:  # a chunk in the middle of a prompt wants no logits, and oneDNN refuses 0 rows
            return x_TI.new_empty(0, self._num_outputs)
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._onednn, bias_O, "none", [], "")
        return y_TO


class GatedFloatMatrix(FloatMatrix):
    """silu(gate) * up, [T, F], of a product [T, 2 F] whose first half is the gate: in one pass where there is one."""

    def __init__(self, weight_OI: torch.Tensor, kernels: Kernels, slots: Sequence[Slot] = ()) -> None:
        super().__init__(weight_OI, slots)
        self._kernels = kernels

    def pack(self) -> None:
        if self._weight_OI is not None and can_pack(self._weight_OI):
            self._packed = PackedFloats(self._weight_OI, gated=True)
            self._release()
        super().pack()

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x_TI, bias_O)
        return self._kernels.silu_mul(self.before_gate(x_TI, bias_O))


class FloatEncoding:
    """`NAME.weight`, [outputs, inputs], in any floating-point type."""

    def matrix(self, context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
        shape = share.num_outputs, share.num_inputs
        weight_OI = context.zeros(*shape) if share.padding else context.empty(*shape)
        slots = list(_slots(weight_OI, share))
        return GatedFloatMatrix(weight_OI, context.kernels, slots) if gated else FloatMatrix(weight_OI, slots)


FLOAT_ENCODING = FloatEncoding()


def only_floats(_: str) -> WeightEncoding:
    return FLOAT_ENCODING


def _slots(weight_OI: torch.Tensor, share: WeightShare) -> Iterator[Slot]:
    by_inputs = share.num_inputs < share.total_inputs
    sizes = [projection.size for projection in share.projections]
    targets = torch.split(weight_OI[: sum(sizes)], sizes)
    for projection, target in zip(share.projections, targets, strict=True):
        yield Slot(
            name=f"{projection.name}.weight",
            shape=(projection.total, share.total_inputs),
            target=target,
            dim=1 if by_inputs else 0,
            start=share.first_input if by_inputs else projection.start,
            order=projection.order,
        )


def _onednn_packs(weight_OI: torch.Tensor) -> bool:
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32
