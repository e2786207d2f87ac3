"""AWQ against checkpoints encoded by the format's rules, served in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.served import assert_served, write_quantised
from workers.models.model_config import read_config

CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}


@pytest.mark.parametrize(
    ("family", "group_size", "tp", "overrides"),
    [
        ("llama", 32, 2, {"tie_word_embeddings": True}),
        ("mistral", -1, 1, {}),
        ("qwen2", 16, 2, {"tie_word_embeddings": False}),
        ("qwen3", 32, 1, {}),
    ],
)
def test_logits_equal_those_of_dequantised_weights(
    family: str, group_size: int, tp: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    oracle = write_quantised(family, tmp_path, awq(group_size), CONFIG | {"group_size": group_size}, **overrides)
    assert_served(tmp_path, oracle, tp=tp)


def test_the_older_config_file_is_read(tmp_path: Path) -> None:
    older = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    oracle = write_quantised("llama", tmp_path, awq(), None, beside={"quant_config.json": older})
    assert_served(tmp_path, oracle)
    weight_format = read_config(tmp_path).weight_format
    assert weight_format is not None
    assert weight_format.label == "awq-int4-g32"
