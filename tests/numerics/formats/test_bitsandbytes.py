"""bitsandbytes against checkpoints encoded by its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint, UnsupportedModel
from tests.numerics.formats.bitsandbytes_encoder import int8_rows, nf4
from tests.numerics.formats.byte_encoder import round_inputs, rounded
from tests.numerics.formats.served import (
    assert_near,
    assert_served,
    dequantised_weight,
    matrix_of,
    write_quantised,
)
from workers.models.loader import load_model
from workers.models.model_config import read_config

INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
IN_4 = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("family", "encode", "tp", "overrides"),
    [
        ("llama", nf4(), 1, {"tie_word_embeddings": True}),
        ("qwen3", nf4(16, nested=True), 2, {}),
        ("mistral", nf4(16), 2, {}),
        ("qwen2", nf4(nested=True), 1, {}),
    ],
    ids=["plain", "nested-tp2", "plain-tp2", "nested"],
)
def test_nf4_has_the_logits_of_the_dequantised_weights(
    family: str, encode: Any, tp: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    assert_served(tmp_path, write_quantised(family, tmp_path, encode, IN_4, **overrides), tp=tp)


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_outliers_are_chosen_row_by_row(threshold: float, tmp_path: Path) -> None:
    """In bitsandbytes an answer depends on its batch."""
    oracle = write_quantised("llama", tmp_path, int8_rows, INT8 | {"llm_int8_threshold": threshold})
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(3)) * 2
    x[2, 7], x[5, 90], x[5, 3] = 40.0, -6.0, 17.0
    weight, matrix = dequantised_weight(oracle, LAYER).double(), matrix_of(tmp_path, LAYER, 64, 96)
    large = x.abs() >= threshold if threshold else torch.zeros_like(x, dtype=torch.bool)
    theirs = rounded(x.masked_fill(large, 0), "int8") @ weight.T + x.double().masked_fill(~large, 0) @ weight.T
    ours = matrix(x)
    assert (ours.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert all(torch.equal(matrix(x[row : row + 1])[0], ours[row]) for row in range(9))


def test_int8_is_served(tmp_path: Path) -> None:
    oracle = write_quantised("qwen3", tmp_path, int8_rows, INT8)
    round_inputs(oracle, 2, "int8")
    assert_near(tmp_path, oracle, tp=2)
    weight_format = read_config(tmp_path).weight_format
    assert weight_format is not None
    assert weight_format.label == "bitsandbytes-int8"


@pytest.mark.parametrize(
    ("encode", "named"),
    [
        (nf4(state={"quant_type": "fp4"}), "quant_state.* has .type, block, shape. .'fp4', 32"),
        (nf4(state={"shape": [1 << 60, 2]}), "its tensors make it"),
        (nf4(state={"shape": 3}), "is not the JSON that bitsandbytes writes"),
        (nf4(nested=True, state={"nested_blocksize": 0}), "has nested blocks of 0"),
        (nf4(128), "absmax' has "),
    ],
)
def test_a_state_that_contradicts_the_tensors_is_named(encode: Any, named: str, tmp_path: Path) -> None:
    write_quantised("llama", tmp_path, encode, IN_4)
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=named):
        load_model(tmp_path)


def test_another_layout_of_int8_is_refused(tmp_path: Path) -> None:
    def columns(name: str, weight: torch.Tensor) -> Any:
        stored, dequantised = int8_rows(name, weight)
        return stored | {"weight_format": torch.tensor(1, dtype=torch.uint8)}, dequantised

    write_quantised("llama", tmp_path, columns, INT8)
    with pytest.raises(UnsupportedModel, match="weight_format' is 1, which is not served: rows, 0, are"):
        load_model(tmp_path)
