"""Logits of every family against transformers: whole prompts, chunks over the cache, mixed batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from workers.models.loader import load_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps-head-dim": ("llama", {"rms_norm_eps": 1e-3, "head_dim": 24}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-half-windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-windowed-one-expert": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-dense-first-windows": (
        "qwen2_moe",
        {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": True},
    ),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-one-group": ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": True}),
    "gpt-oss": ("gpt_oss", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-all-experts": ("qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False, "head_dim": 32}),
    "qwen3-moe-every-second": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-compressed-queries": (
        "deepseek_v2",
        {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "minimax-m2": ("minimax_m2", {}),
    "minimax-m2-one-expert-all-turn": (
        "minimax_m2",
        {"num_experts_per_tok": 1, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-scaled": (
        "gemma3",
        {
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-partial-longrope": (
        "phi3",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biased": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": ("olmo3", {}),
    "olmo3-yarn": (
        "olmo3",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "exaone4": ("exaone4", {}),
    "exaone4-no-windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-unbiased": ("seed_oss", {"attention_bias": False, "mlp_bias": True}),
    "ernie4-5": ("ernie4_5", {}),
    "ernie4-5-unbiased": ("ernie4_5", {"use_bias": False, "tie_word_embeddings": False}),
    "ministral3": ("ministral3", {}),
    "ministral3-windowed": ("ministral3", {"sliding_window": 9, "head_dim": 16}),
    "arcee": ("arcee", {}),
    "arcee-biased-tied": ("arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite": ("granite", {}),
    "granite-biased": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4-all-turn": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "smollm3": ("smollm3", {}),
    "smollm3-windowed": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9, "mlp_bias": True},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-windowed": ("starcoder2", {"sliding_window": 5, "use_bias": False, "tie_word_embeddings": False}),
    "cohere2": ("cohere2", {}),
    "cohere2-biased": ("cohere2", {"attention_bias": True, "num_hidden_layers": 3, "tie_word_embeddings": False}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> tuple[Path, Any]:
    family, overrides = MODELS[request.param]
    return checkpoint(family, **overrides)


@torch.no_grad()
def test_a_whole_prompt_has_the_oracles_logits(model: tuple[Path, Any]) -> None:
    folder, oracle = model
    tokens = random_tokens(67)
    ours = PagedRun(load_model(folder)).step([("only", tokens, len(tokens))])[0]
    assert_close(ours, oracle(torch.tensor([tokens])).logits[0])


@torch.no_grad()
def test_chunks_and_single_tokens_continue_from_the_cache(model: tuple[Path, Any]) -> None:
    folder, oracle = model
    tokens = random_tokens(53, seed=1)
    ours = in_chunks(PagedRun(load_model(folder)), tokens, [16, 1, 24, 5], prompt_len=46)
    assert_close(ours, oracle(torch.tensor([tokens])).logits[0])


@torch.no_grad()
def test_rows_of_a_mixed_batch_do_not_touch_one_another(model: tuple[Path, Any]) -> None:
    """Six sequences of different lengths; each step feeds some of them a chunk or a single token."""
    folder, oracle = model
    sequences = {f"s{n}": random_tokens(11 + 9 * n, seed=n) for n in range(6)}
    run, chance = PagedRun(load_model(folder)), random.Random(3)
    fed: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    done = dict.fromkeys(sequences, 0)
    while unfinished := [name for name in sequences if done[name] < len(sequences[name])]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        cuts = {name: done[name] + chance.choice([1, 1, 7, 20]) for name in chosen}
        rows = [(name, sequences[name][done[name] : cuts[name]], len(sequences[name])) for name in chosen]
        for (name, token_ids, _), logits in zip(rows, run.step(rows), strict=True):
            fed[name].append(logits)
            done[name] += len(token_ids)
    for name, tokens in sequences.items():
        assert_close(torch.cat(fed[name]), oracle(torch.tensor([tokens])).logits[0])


def test_only_the_rows_asked_for_get_logits(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("llama")
    tokens = random_tokens(9)
    run = PagedRun(load_model(folder))
    everything = run.step([("a", tokens, 9)])[0]
    assert_close(run.logits([("b", tokens, 9)], [8, 0, 4]), everything[[8, 0, 4]])


@torch.no_grad()
def test_bfloat16_stays_near_the_oracle(checkpoint: Checkpoint) -> None:
    """bfloat16 keeps 8 bits: the same best token where the oracle is sure, and a correlation near one."""
    folder, oracle = checkpoint("llama")
    tokens = random_tokens(40)
    ours = PagedRun(load_model(folder, dtype="bfloat16")).step([("only", tokens, 40)])[0]
    theirs = oracle(torch.tensor([tokens])).logits[0]
    correlation = torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1]
    assert correlation > 0.999
