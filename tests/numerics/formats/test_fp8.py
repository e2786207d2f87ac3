"""quant_method fp8: blocks as DeepSeek writes them, one scale a tensor as AutoFP8 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint
from tests.numerics.formats.byte_encoder import in_bytes, round_inputs, rounded
from tests.numerics.formats.served import (
    assert_near,
    dequantised_weight,
    matrix_of,
    write_quantised,
)
from workers.models.loader import load_model

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [40, 24]}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = in_bytes("fp8", "block", block=(40, 24), scale_name="weight_scale_inv")
POWERS = in_bytes("fp8", "block", block=(40, 24), scale_name="weight_scale_inv", scale_dtype=torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("family", "encode", "config", "reference", "tp"),
    [
        ("llama", BLOCKS, DEEPSEEK, {"group": 24}, 2),
        ("qwen3", POWERS, DEEPSEEK | {"scale_fmt": "ue8m0"}, {"group": 24}, 1),
        ("mistral", in_bytes("fp8", "tensor"), DYNAMIC, {}, 2),
        ("qwen2", in_bytes("fp8", "tensor", input_scale=torch.tensor(0.004)), STATIC, {"scale": 0.004}, 2),
    ],
    ids=["blocks-tp2", "powers-of-two", "tensor-tp2", "static-tp2"],
)
def test_products_are_a_float64_references_and_logits_near(
    family: str, encode: Any, config: dict[str, Any], reference: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    oracle = write_quantised(family, tmp_path, encode, config)
    round_inputs(oracle, tp, "fp8", **reference)
    assert_near(tmp_path, oracle, tp=tp)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(5)) * torch.logspace(-2, 0, 7)[:, None]
    weight = dequantised_weight(oracle, "model.layers.1.mlp.down_proj")
    theirs = rounded(x, "fp8", **reference) @ weight.double().T
    ours = matrix_of(tmp_path, "model.layers.1.mlp.down_proj", *weight.shape)(x)
    assert (ours.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    write_quantised("llama", tmp_path, BLOCKS, DEEPSEEK | {"weight_block_size": [128, 128]})
    with pytest.raises(BadCheckpoint, match=r"weight_scale_inv' is \(2, 3\), config\.json makes it \(1, 1\)"):
        load_model(tmp_path)
