"""Families that store their weights in their own way, quantised. Their logits are in test_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import UnsupportedModel
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode, assert_served, write_quantised
from tests.numerics.formats.test_awq import CONFIG as AWQ
from tests.numerics.formats.test_rounded import by_the_rule
from tests.numerics.paged import PagedRun
from tests.numerics.test_tensor_parallel import on_ranks
from workers.models.loader import load_model
from workers.models.model_config import weight_bytes
from workers.parallel.group import TensorParallel
from workers.quantise.quantise import check_float_folder

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
MODELS: dict[str, dict[str, Any]] = {"phi3": PARTIAL, "glm4": {}, "starcoder2": {"sliding_window": 5}}


@torch.no_grad()
def test_weights_are_rounded_at_load_row_by_row(tmp_path: Path) -> None:
    oracles: dict[str, Any] = {}
    for family in ("phi3", "glm4", "starcoder2"):
        overrides = MODELS[family] | {"hidden_size": 128, "tie_word_embeddings": False}
        oracles[family] = oracle = make_checkpoint(family, tmp_path / family, **overrides)
        for name, weight in oracle.named_parameters():
            weight.copy_(by_the_rule(name.replace("c_fc", "c_proj"), weight, "int8"))
        floats, integers = (weight_bytes(tmp_path / family, "float32", levels) for levels in ("off", "int8"))
        assert integers < 0.5 * floats
        with pytest.raises(UnsupportedModel, match=f"how {family} stores .* set worker.quantize"):
            check_float_folder(tmp_path / family)
    tokens = random_tokens(33, seed=1)

    def program(group: TensorParallel) -> dict[str, torch.Tensor]:
        logits = {}
        for family in oracles:
            model = load_model(tmp_path / family, quantize="int8", parallel=group)
            model.pack()
            logits[family] = PagedRun(model).step([("only", tokens, 33)])[0]
        return logits

    for every in on_ranks(2, program):
        for family, oracle in oracles.items():
            assert_close(every[family], oracle(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(
    ("family", "encode", "config", "tp"),
    [
        ("phi3", gptq(act_order=True), gptq_config(desc_act=True), 2),
        ("glm4", awq(), AWQ, 2),
        ("starcoder2", gptq(), gptq_config(), 1),
    ],
    ids=["phi3-gptq-tp2", "glm4-awq-tp2", "starcoder2-gptq"],
)
def test_quantised_checkpoints_are_served(
    family: str, encode: Encode, config: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    """Fused tensors, rows in rope's order, other names, and biases."""
    oracle = write_quantised(family, tmp_path, encode, config, tie_word_embeddings=False, **MODELS[family])
    assert_served(tmp_path, oracle, tp=tp)
