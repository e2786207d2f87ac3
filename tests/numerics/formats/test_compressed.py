"""compressed-tensors against checkpoints encoded by the format's rules, served in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint
from tests.numerics.formats.byte_encoder import in_bytes, round_inputs, rounded
from tests.numerics.formats.compressed_encoder import config_of, floats, integers, packed
from tests.numerics.formats.served import assert_near, assert_served, dequantised_weight, matrix_of, write_quantised
from workers.models.loader import load_model
from workers.models.model_config import read_config

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = BY_TOKEN | {"strategy": "tensor", "dynamic": False}
FP8_TOKEN, FP8_STATIC = BY_TOKEN | {"type": "float"}, STATIC | {"type": "float"}
MINUS_31 = torch.tensor(-31, dtype=torch.int8)
FP8_GROUP = FP8_TOKEN | {"strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("family", "encode", "config", "tp", "overrides"),
    [
        ("llama", packed(), config_of(PACKED, integers(4, "group", 32)), 2, {"tie_word_embeddings": True}),
        ("mistral", packed(8, None), config_of(PACKED, integers(8, "channel")), 1, {}),
        (
            "qwen2",
            packed(symmetric=False, scale_dtype=torch.bfloat16),
            config_of(PACKED, integers(4, "group", 32, symmetric=False)),
            2,
            {},
        ),
        (
            "qwen3",
            packed(act_order=True),
            config_of(PACKED, integers(4, "group", 32, actorder="group")),
            2,
            {"tie_word_embeddings": True},
        ),
        ("llama", packed(8, None, one_scale=True), config_of(PACKED, integers(8, "tensor")), 1, {}),
        ("llama", in_bytes("int8", "group"), config_of(INT, integers(8, "group", 32)), 2, {}),
        (
            "mistral",
            in_bytes("int8", "channel", asymmetric=True),
            config_of(INT, integers(8, "channel", symmetric=False)),
            2,
            {},
        ),
        (
            "qwen2",
            in_bytes("fp8", "block", block=(24, 40)),
            config_of(NAIVE, floats("block", block_structure=[24, 40])),
            2,
            {},
        ),
        ("qwen3", in_bytes("fp8", "channel", scale_dtype=torch.bfloat16), config_of(FLOAT, floats("channel")), 2, {}),
        ("llama", in_bytes("fp8", "tensor"), config_of(FLOAT, floats("tensor")), 2, {}),
    ],
    ids=["int4-tp2", "int8", "zeros-tp2", "act-order-tp2", "one-scale", "int8-groups-tp2", "int8-zeros-tp2",
         "fp8-blocks-tp2", "fp8-channel-tp2", "fp8-tensor-tp2"],
)  # fmt: skip
def test_logits_equal_those_of_dequantised_weights(
    family: str, encode: Any, config: dict[str, Any], tp: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    oracle = write_quantised(family, tmp_path, encode, config, **overrides)
    assert_served(tmp_path, oracle, tp=tp)


@pytest.mark.parametrize(
    ("encode", "config", "reference"),
    [
        (in_bytes("int8", "channel"), config_of(INT, integers(8, "channel"), BY_TOKEN), {"levels": "int8"}),
        (
            in_bytes("int8", "tensor", input_scale=torch.tensor([0.011])),
            config_of(INT, integers(8, "tensor"), STATIC),
            {"levels": "int8", "scale": 0.011},
        ),
        (
            in_bytes("int8", "channel", input_scale=torch.tensor(0.01), input_zero_point=MINUS_31),
            config_of(INT, integers(8, "channel"), STATIC | {"symmetric": False}),
            {"levels": "int8", "scale": 0.01, "zero": -31},
        ),
        (
            in_bytes("fp8", "tensor", input_scale=torch.tensor(0.002)),
            config_of(FLOAT, floats("tensor"), FP8_STATIC),
            {"levels": "fp8", "scale": 0.002},
        ),
        (in_bytes("fp8", "channel"), config_of(FLOAT, floats("channel"), FP8_TOKEN), {"levels": "fp8"}),
        (
            in_bytes("fp8", "block"),
            config_of(FLOAT, floats("block", block_structure="32x32"), FP8_GROUP),
            {"levels": "fp8", "group": 32},
        ),
    ],
    ids=["int8-token", "int8-static", "int8-static-zero", "fp8-static", "fp8-token", "fp8-group"],
)  # fmt: skip
def test_rounded_activations_are_a_float64_references(
    encode: Any, config: dict[str, Any], reference: dict[str, Any], tmp_path: Path
) -> None:
    """With rows of zeros and large values; a row's bits do not depend on other rows."""
    oracle = write_quantised("llama", tmp_path, encode, config)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 1, 9)[:, None]
    x[4] = 0
    for name in ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"):
        weight = dequantised_weight(oracle, name)
        matrix = matrix_of(tmp_path, name, *weight.shape)
        ours = matrix(x)
        theirs = rounded(x, **reference) @ weight.double().T
        assert (ours.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
        assert torch.equal(matrix(x[3:4]), ours[3:4])
    round_inputs(oracle, 2, **reference)
    assert_near(tmp_path, oracle, tp=2)


def test_targets_and_ignored_layers_may_be_names_or_patterns(tmp_path: Path) -> None:
    """The exact name comes before the pattern, and that before the class."""

    def encode(name: str, weight: torch.Tensor) -> Any:
        if name.startswith("model.layers.0.mlp"):
            return None
        if name == "model.layers.1.mlp.up_proj":
            return in_bytes("fp8", "channel")(name, weight)
        return (packed(8, None) if name.endswith("v_proj") else packed())(name, weight)

    def group(layout: str, weights: dict[str, Any], *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": weights, "format": layout}

    config = config_of("mixed-precision", {}) | {
        "config_groups": {
            "a": group(PACKED, integers(4, "group", 32), "Linear"),
            "b": group(PACKED, integers(8, "channel"), r"re:.*(v|up)_proj$"),
            "c": group(FLOAT, floats("channel"), "model.layers.1.mlp.up_proj"),
        },
        "ignore": ["lm_head", r"re:model\.layers\.0\.mlp.*"],
    }
    oracle = write_quantised("llama", tmp_path, encode, config)
    assert_served(tmp_path, oracle, tp=2)
    weight_format = read_config(tmp_path).weight_format
    assert weight_format is not None
    assert weight_format.label == "compressed-tensors-int4-g32-mixed"


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    def encode(name: str, weight: torch.Tensor) -> Any:
        stored, dequantised = packed()(name, weight) or ({}, weight)
        return stored | {"weight_shape": torch.tensor([64, 65])}, dequantised

    write_quantised("llama", tmp_path, encode, config_of(PACKED, integers(4, "group", 32)))
    with pytest.raises(BadCheckpoint, match=r"weight_shape' is \[64, 65\], config\.json makes it"):
        load_model(tmp_path)


def test_an_invalid_scale_is_named(tmp_path: Path) -> None:
    encode = in_bytes("int8", "tensor", input_scale=torch.tensor([float("nan")]))
    write_quantised("llama", tmp_path, encode, config_of(INT, integers(8, "tensor"), STATIC))
    with pytest.raises(BadCheckpoint, match="input_scale' is nan: a scale must be above 0"):
        load_model(tmp_path)
