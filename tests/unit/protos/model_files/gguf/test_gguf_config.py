"""The meaning of a GGUF file's keys, and of their absence, for each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.gguf.gguf_config import config_of
from protos.model_files.gguf.gguf_file import GGUFFile
from tests.gguf_writer import Stored, write_gguf

NUMBERS = Stored((4,), "F32", bytes(16))
EMBEDDING = Stored((8, 64), "F32", bytes(8 * 64 * 4))
SIZES: dict[str, Any] = {
    "context_length": 512, "embedding_length": 64, "block_count": 4, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 12, "rope.dimension_count": 8,
    "expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 32,
}  # fmt: skip


def config(folder: Path, name: str, *tensors: str, **keys: Any) -> dict[str, Any]:
    own = {f"{name}.{key}": value for key, value in (SIZES | keys).items()}
    stored = {"token_embd.weight": EMBEDDING, **dict.fromkeys(tensors, NUMBERS)}
    path = write_gguf(folder / "model.gguf", {"general.architecture": name, **own}, stored)
    return config_of(GGUFFile(path))


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("gemma2", {"attention.key_length": 24}, {"query_pre_attn_scalar": 24}),
        ("gemma2", {"attention.key_length": 24, "block_count": 46}, {"query_pre_attn_scalar": 16}),
        ("gemma3", {"attention.key_length": 24, "block_count": 62}, {"query_pre_attn_scalar": 16}),
        ("gemma3", {}, {"sliding_window": None}),
        (
            "gemma3",
            {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
        (
            "cohere2",
            {"attention.sliding_window": 9, "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5},
            {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True},
        ),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None, "partial_rotary_factor": 1.0}),
        ("phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
        ("starcoder2", {"attention.layer_norm_epsilon": 1e-5}, {"sliding_window": 4096, "use_bias": False}),
        ("deepseek2", LATENT, {"architectures": ["DeepseekV2ForCausalLM"], "n_group": 8, "q_lora_rank": None}),
        ("deepseek2", LATENT | {"expert_gating_func": 2, "expert_count": 384}, {"n_group": 1, "qk_nope_head_dim": 16}),
        ("deepseek2", LATENT | {"expert_gating_func": 2, "nextn_predict_layers": 1}, {"num_hidden_layers": 3}),
    ],
)
def test_keys_have_their_meaning(name: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    fields = config(tmp_path, name, **keys)
    assert {field: fields.get(field, "absent") for field in expected} == expected


def test_a_correction_of_scores_implies_the_router(tmp_path: Path) -> None:
    fields = config(tmp_path, "deepseek2", "blk.3.exp_probs_b.bias", **LATENT)
    assert fields["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (fields["n_group"], fields["topk_group"]) == (8, 4)


@pytest.mark.parametrize(
    ("name", "keys", "error", "says"),
    [
        ("deepseek2", LATENT | {"expert_gating_func": 3}, UnsupportedModel, "expert_gating_func is 3.*1 or 2"),
        ("glm4moe", {"expert_gating_func": 1}, UnsupportedModel, "expert_gating_func is 1.* 2"),
        ("minimax-m2", {"expert_gating_func": 1}, UnsupportedModel, "expert_gating_func is 1.* 2"),
        ("granite", {"rope.scaling.finetuned": False}, UnsupportedModel, "finetuned is False.*without positions"),
        ("qwen2", {"expert_count": 4}, UnsupportedModel, "expert_count is 4"),
        ("qwen3", {"rope.dimension_count": 8}, UnsupportedModel, "rope.dimension_count is 8.* 16"),
        ("llama", {"attention.temperature_scale": 0.1}, UnsupportedModel, "temperature_scale is 0.1"),
        ("qwen3", {"attention.sliding_window": 9}, UnsupportedModel, "sliding_window is 9, and no key says"),
        (
            "gemma3",
            {"attention.sliding_window": 9, "attention.sliding_window_pattern": ("bool", [True, False])},
            BadCheckpoint,
            "sliding_window_pattern has 2 values for 4 layers",
        ),
        ("bert", {}, UnsupportedModel, "'bert', which is not supported: known are llama, .*gpt-oss"),
    ],
)
def test_unserved_architectures_are_refused_by_name(
    name: str, keys: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        config(tmp_path, name, **keys)
