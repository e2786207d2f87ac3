"""Products with weights that were packed once for the processor's tiles (AMX): `products.cpp`.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from workers.kernels.cpu.build import Tiles, native_tiles
from workers.kernels.cpu.memory import apart, empty_rows, roomy_zeros

_PANEL = 32
_DEPTH = 32
_WORTH_PADDING = 8 * _DEPTH


def can_tile(weight_OI: torch.Tensor) -> bool:
    """Has this machine tiles, and do they take this weight? Inputs that fill no tile are padded: with a product whose
    rows depend on how many there are, an answer that is recomputed would not be the same."""
    plain = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.bfloat16
    deep = weight_OI.shape[1] % _DEPTH == 0 or weight_OI.shape[1] >= _WORTH_PADDING
    return plain and deep and min(weight_OI.shape) > 0 and native_tiles() is not None


class TiledWeight:
    """y = x W^T (+ b), or, gated, silu(gate) * up of the two halves of y. Packs a copy of the weight.

    `packed` has `num_outputs` rounded up to panels, and of each `depth` inputs, those beyond the weight's zeros.
    """

    def __init__(self, weight_OI: torch.Tensor, *, gated: bool = False) -> None:
        tiles = native_tiles()
        assert tiles is not None
        assert can_tile(weight_OI)
        self._tiles: Tiles = tiles
        self.num_outputs, self._num_inputs = weight_OI.shape
        self._gated = gated
        self.depth = -(-self._num_inputs // _DEPTH) * _DEPTH
        self._order = _order(self.num_outputs, gated)
        self.packed = roomy_zeros(len(self._order), self.depth, dtype=torch.bfloat16)
        self._bias_O: torch.Tensor | None = None
        self._packed_bias = torch.empty(0)
        weight_OI = self._padded(weight_OI).contiguous()
        sizes = len(self._order), self.depth, torch.get_num_threads()
        tiles.pack_product(weight_OI.data_ptr(), self.packed.data_ptr(), self._order.data_ptr(), *sizes)

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O], or [T, O / 2] when gated: then another product reads it, and its rows stand as that likes them."""
        assert x_TI.dtype == torch.bfloat16
        assert x_TI.shape[1] == self._num_inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        x_TI = self._padded(x_TI)
        bias = self.packed_bias(bias_O)
        width = self.num_outputs // 2 if self._gated else self.num_outputs
        stride = apart(width, torch.bfloat16) if self._gated else width
        out_TO = empty_rows(x_TI.shape[0], width, dtype=torch.bfloat16, stride=stride)
        self._tiles.product(
            x_TI.data_ptr(),
            self.packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out_TO.data_ptr(),
            x_TI.shape[0],
            self.num_outputs,
            self.depth,
            x_TI.stride(0),
            stride,
            self._gated,
            torch.get_num_threads(),
        )
        return out_TO

    def packed_bias(self, bias_O: torch.Tensor | None) -> torch.Tensor | None:
        """In the packed outputs' order, in float32; the last one asked for is kept."""
        if bias_O is None:
            return None
        if bias_O is not self._bias_O:
            self._bias_O, self._packed_bias = bias_O, bias_O.float()[self._order.clamp(min=0)]
        return self._packed_bias

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        if self.depth == self._num_inputs:
            return rows
        padded = empty_rows(rows.shape[0], self.depth, dtype=rows.dtype, stride=apart(self.depth, rows.dtype))
        padded[:, : self._num_inputs] = rows
        padded[:, self._num_inputs :] = 0
        return padded


def _order(num_outputs: int, gated: bool) -> torch.Tensor:
    """Which output stands where in the panels, -1 where none does. Gated: 16 of the gate, then their 16 of up."""
    if not gated:
        order = torch.full((-(-num_outputs // _PANEL) * _PANEL,), -1)
        order[:num_outputs] = torch.arange(num_outputs)
        return order
    half = num_outputs // 2
    width = _PANEL // 2
    columns = torch.arange(-(-half // width) * width).view(-1, 1, width)
    pairs = torch.cat([columns, columns + half], dim=1)
    return torch.where(columns < half, pairs, -1).flatten()
