"""bitsandbytes' files by their rules: int8 rows, and NF4 in blocks of the flattened weight."""

from __future__ import annotations

import json

import torch

from tests.numerics.formats.served import Encode, Encoded

NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def int8_rows(_: str, weight: torch.Tensor) -> Encoded:
    largest = weight.abs().amax(1)
    codes = (127 * weight / largest[:, None]).round()
    stored = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes * (largest / 127)[:, None]


def nf4(block: int = 32, *, nested: bool = False, state: dict[str, object] | None = None) -> Encode:
    def encode(_: str, weight: torch.Tensor) -> Encoded:
        blocks = weight.reshape(-1, block)
        absmax = blocks.abs().amax(1)
        stored: dict[str, torch.Tensor] = {"weight.quant_map": NF4}
        fields = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        if nested:
            levels, offset = torch.linspace(-1, 1, 256) ** 3, absmax.mean()
            parts = torch.split(absmax - offset, 256)
            largest = torch.stack([part.abs().max() for part in parts])
            codes = [
                ((part / most)[:, None] - levels).abs().argmin(1) for part, most in zip(parts, largest, strict=True)
            ]
            absmax = torch.cat([levels[code] * most for code, most in zip(codes, largest, strict=True)]) + offset.item()
            stored |= {
                "weight.absmax": torch.cat(codes).to(torch.uint8),
                "weight.nested_absmax": largest,
                "weight.nested_quant_map": levels,
            }
            fields |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        else:
            stored["weight.absmax"] = absmax
        picked = ((blocks / absmax[:, None])[..., None] - NF4).abs().argmin(-1)
        pairs = picked.reshape(-1, 2)
        stored["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        text = json.dumps(fields | (state or {})).encode()
        stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, (NF4[picked] * absmax[:, None]).view_as(weight)

    return encode
