"""EXL2 against checkpoints encoded by the format's rules, served in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint
from tests.numerics.formats.exl2_encoder import exl2
from tests.numerics.formats.served import assert_served, write_quantised
from workers.models.loader import load_model

CONFIG: dict[str, Any] = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.25, "head_bits": 6}


@pytest.mark.parametrize(
    ("family", "encode", "tp", "overrides"),
    [
        ("llama", exl2(), 2, {"vocab_size": 161}),
        ("mistral", exl2(((5, 32), (3, 32))), 1, {}),
        ("qwen2", exl2(((8, 32), (2, 32)), old=True), 2, {"tie_word_embeddings": False}),
        ("qwen3", exl2(((4, 32),)), 2, {}),
    ],
)
def test_logits_equal_those_of_dequantised_weights(
    family: str, encode: Any, tp: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Each projection has its own order. The head is quantised too, even if config.json ties it."""
    oracle = write_quantised(family, tmp_path, encode, CONFIG, head=True, **overrides)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": family == "qwen2"}))
    (tmp_path / "model.safetensors").rename(tmp_path / "output.safetensors")
    assert_served(tmp_path, oracle, tp=tp)


@pytest.mark.parametrize(
    ("suffix", "value", "named"),
    [
        ("q_groups", torch.tensor([6, 0, 7, 6], dtype=torch.int16), "q_groups' must make up 64"),
        ("q_groups", torch.tensor([6, 0, 4, 0], dtype=torch.int16), "q_groups' must make up 64"),
        ("q_groups", torch.tensor([6, 0, 4, -3], dtype=torch.int16), "q_groups' must make up 64"),
        ("q_invperm", torch.zeros(64, dtype=torch.int32), "q_invperm' is no permutation of 64 inputs"),
        ("q_weight", torch.zeros(3, 64, dtype=torch.int32), "q_groups' must make up 64"),
        ("q_weight", torch.zeros(10, 32, dtype=torch.int32), r"q_weight' is \(10, 32\)"),
    ],
)
def test_damage_is_named_before_a_weight_is_read(suffix: str, value: torch.Tensor, named: str, tmp_path: Path) -> None:
    def encode(name: str, weight: torch.Tensor) -> Any:
        stored, dequantised = exl2()(name, weight) or ({}, weight)
        return (stored | {suffix: value} if name.endswith("q_proj") else stored), dequantised

    write_quantised("llama", tmp_path, encode, CONFIG)
    with pytest.raises(BadCheckpoint, match=named):
        load_model(tmp_path)
