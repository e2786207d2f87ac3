"""Dense little-endian bit streams: value i of a row is at bit i * bits, and may reach into the next byte.

GPTQ, compressed-tensors and EXL2 pack their codes this way, and so does `QuantisedWeight`. Eight values take `bits`
bytes, so each step works on eight values a row. Legend: O rows, I values of a row, W bytes of a row.
"""

from __future__ import annotations

import numpy as np
import torch

_TILE = 1 << 19  # values unpacked at a time, tile by tile


def packed_bytes(num_values: int, bits: int) -> int:
    return -(-num_values * bits // 8)


def pack_bits(values_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, W] of uint8 values below 2**bits."""
    num_rows, num_values = values_OI.shape
    if bits == 8:
        return values_OI.contiguous()
    if bits == 4 and num_values % 2 == 0:
        return values_OI[:, ::2] | (values_OI[:, 1::2] << 4)
    eights = -(-num_values // 8)
    sums = torch.zeros(num_rows, eights, dtype=torch.int64, device=values_OI.device)
    for place in range(8):
        column = values_OI[:, place::8].to(torch.int64)
        sums[:, : column.shape[1]] |= column << (place * bits)
    stream = sums.view(torch.uint8).view(num_rows, eights, 8)[:, :, :bits].flatten(1)
    return stream[:, : packed_bytes(num_values, bits)].contiguous()


def unpack_bits(stream_OW: torch.Tensor, bits: int, num_values: int) -> torch.Tensor:
    """uint8 [O, I]: the first `num_values` of each row."""
    if bits == 8:
        return stream_OW[:, :num_values]
    if bits == 4:
        pairs = stream_OW[:, : packed_bytes(num_values, bits)].to(torch.int16)
        nibbles = ((pairs | (pairs << 4)) & 0x0F0F).flatten().view(torch.uint8)
        return nibbles.view(pairs.shape[0], 2 * pairs.shape[1])[:, :num_values]
    num_rows, eights = stream_OW.shape[0], -(-num_values // 8)
    used = stream_OW[:, : packed_bytes(num_values, bits)]
    whole = torch.zeros(num_rows, eights * bits, dtype=torch.uint8, device=stream_OW.device)
    whole[:, : used.shape[1]] = used
    words = torch.zeros(num_rows, eights, 8, dtype=torch.uint8, device=stream_OW.device)
    words[:, :, :bits] = whole.view(num_rows, eights, bits)
    sums = words.view(torch.int64).squeeze(2)
    values = torch.empty(num_rows, eights, 8, dtype=torch.uint8, device=stream_OW.device)
    for place in range(8):
        values[:, :, place] = (sums >> (place * bits)) & ((1 << bits) - 1)
    return values.flatten(1)[:, :num_values]


def select_columns(stream_OW: torch.Tensor, bits: int, columns: torch.Tensor | slice, num_values: int) -> torch.Tensor:
    """Selects columns of each row's `num_values`, in their order. Unpacks one tile of rows at a time."""
    if isinstance(columns, slice):
        first, last, _ = columns.indices(num_values)
        if first * bits % 8 == 0:
            return stream_OW[:, first * bits // 8 : packed_bytes(last, bits)].contiguous()
    tiles = [
        pack_bits(_columns(unpack_bits(stream_OW[rows], bits, num_values), columns), bits)
        for rows in tiles_of(stream_OW.shape[0], num_values)
    ]
    return torch.cat(tiles)


def _columns(values_OI: torch.Tensor, columns: torch.Tensor | slice) -> torch.Tensor:
    if isinstance(columns, slice) or values_OI.device.type != "cpu":
        return values_OI[:, columns]
    return torch.from_numpy(np.take(values_OI.numpy(), columns.numpy(), axis=1))


def tiles_of(num_rows: int, num_values: int) -> list[slice]:
    """Divides the rows into ranges of which a few copies are small beside a model."""
    step = max(1, _TILE // max(1, num_values))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)] or [slice(0, 0)]
