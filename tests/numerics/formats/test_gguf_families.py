"""GGUF files of families that are not stored as Llama is: the oracles are the transformers models that they were made
of, with the values that the file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gguf_models import convert
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.formats.served import assert_served
from tests.numerics.formats.test_experts import oracle_of
from workers.weights.formats.gguf_blocks import QUANTISED, weight_of_blocks
from workers.weights.registry import open_source

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.125, 1.25, 1.75, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "attention_factor": 1.25,
}  # fmt: skip
LOCAL_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
OLMO3_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
FAMILIES: list[tuple[str, str, dict[str, Any], int]] = [
    ("gemma2", "Q8_0", {"query_pre_attn_scalar": 24}, 2),
    ("gemma3", "Q4_0", {"query_pre_attn_scalar": 24, "rope_parameters": LOCAL_ROPE}, 1),
    ("phi3", "Q8_0", {}, 2),
    (
        "phi3",
        "F32",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE,
        },
        1,
    ),
    ("glm4", "Q8_0", {"head_dim": 16}, 2),
    ("glm4_moe", "Q4_0", {"attention_bias": True}, 1),
    ("glm4_moe", "F16", {"use_qk_norm": False, "n_group": 1, "topk_group": 1}, 2),
    ("cohere2", "Q8_0", {}, 1),
    ("starcoder2", "Q4_0", {}, 2),
    ("deepseek_v2", "Q8_0", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}, 1),
    ("deepseek_v3", "Q4_0", {"qk_nope_head_dim": 32}, 2),
    (
        "deepseek_v3",
        "F32",
        {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.75, "mscale_all_dim": 0.75}},
        1,
    ),
    ("olmo3", "Q8_0", {"rope_parameters": OLMO3_ROPE}, 2),
    ("exaone4", "Q4_0", {}, 1),
    ("seed_oss", "F16", {}, 1),
    ("ernie4_5", "Q8_0", {"head_dim": 16}, 1),
    ("ministral3", "Q8_0", {"head_dim": 16}, 1),
    ("arcee", "Q8_0", {"attention_bias": True}, 2),
    ("minimax_m2", "Q4_0", {"head_dim": 16}, 1),
    ("gpt_oss", "MXFP4", {"intermediate_size": 64, "swiglu_limit": 7.0}, 2),
    ("gpt_oss", "F32", {"intermediate_size": 64, "swiglu_limit": 7.0}, 1),
    ("glm4_moe_lite", "F16", {"mlp_layer_types": ["dense", "sparse"], "routed_scaling_factor": 1.75}, 1),
]


def values_of(path: Path) -> dict[str, torch.Tensor]:
    """By Hugging Face's names, experts apart."""
    with open_source(path) as source:
        values = {}
        for name in source.names():
            stored = source.describe(name)
            read = source.read(name, 0, slice(0, stored.shape[0]))
            values[name] = (
                weight_of_blocks(stored.dtype, read).dequantised() if stored.dtype in QUANTISED else read.float()
            )
        return values


def stored_oracle(family: str, folder: Path, kind: str, overrides: dict[str, Any], **how: Any) -> tuple[Path, Any]:
    """folder/model.gguf, and the transformers model with its values, which are near those that it was made of."""
    make_checkpoint(family, folder / "hf", **overrides)
    path = convert(folder / "hf", folder / "model.gguf", kind, **how)
    tensors, values = load_file(folder / "hf" / "model.safetensors"), values_of(path)
    if family == "gpt_oss":
        values |= stacked(values, tensors)
    for name, original in tensors.items():
        error = (values[name] - original).norm() / original.norm()
        assert error < {"Q4_0": 0.15, "MXFP4": 0.2}.get(kind, 0.01), (name, error)
    return path, oracle_of(folder / "hf", {name: values[name] for name in tensors})


def stacked(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts as transformers has them."""
    stacks = {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, own = name.partition(".experts.")
        suffix = "bias" if own.endswith("_bias") else "weight"
        parts = [
            torch.stack([found[f"{prefix}.experts.{expert}.{part}.{suffix}"] for expert in range(len(tensors[name]))])
            for part in (("down_proj",) if own.startswith("down") else ("gate_proj", "up_proj"))
        ]
        rows = parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)
        stacks[name] = rows if suffix == "bias" else rows.transpose(1, 2)
    return stacks


@pytest.mark.parametrize(("family", "kind", "overrides", "tp"), FAMILIES, ids=lambda one: str(one)[:12])
@torch.no_grad()
def test_a_file_has_the_logits_of_the_model_it_was_made_of(
    family: str, kind: str, overrides: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    path, oracle = stored_oracle(family, tmp_path, kind, overrides)
    assert_served(path, oracle, tp=tp)


@torch.no_grad()
def test_a_latents_matrix_in_one_tensor_is_that_in_two(tmp_path: Path) -> None:
    """Files of before April 2025 have kv_b_proj whole."""
    path, _ = stored_oracle("deepseek_v3", tmp_path, "F32", {})
    old = convert(tmp_path / "hf", tmp_path / "old.gguf", "F32", whole_latents=True)
    ours, theirs = values_of(path), values_of(old)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
def test_gate_and_up_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "model.gguf", "Q8_0")
    fused = convert(tmp_path / "hf", tmp_path / "fused.gguf", "Q8_0", fused_experts=True)
    ours, theirs = values_of(path), values_of(fused)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
