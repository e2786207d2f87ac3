"""How llama.cpp's converter writes families other than Llama's, for tests: names, keys, and what it does to weights.
Written from conversion/*.py and gguf-py/gguf/tensor_mapping.py of llama.cpp; nothing is shared with the product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss", "olmo3": "olmo2", "minimax_m2": "minimax-m2", "ministral3": "mistral3",
}  # fmt: skip
_GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_SHARED = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
NAMES: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _FUSED,
    "glm4": {
        **_FUSED,
        "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "glm4_moe": {**_SHARED, "post_attention_layernorm": "post_attention_norm"},
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "olmo2": {"post_attention_layernorm": "post_attention_norm"},
}  # fmt: skip
_LATENT = {
    **_SHARED,
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
NAMES |= dict.fromkeys(("olmo3", "exaone4"), NAMES["olmo2"])
NAMES |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT)


def stored_parts(
    name: str, weight: torch.Tensor, config: Mapping[str, Any], *, whole_latents: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The converter's tensors of one, by Hugging Face's names or else by llama.cpp's."""
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        yield name, weight + 1
    elif name.endswith("e_score_correction_bias"):
        yield f"{_block(name)}.exp_probs_b.bias", weight
    elif name.endswith("self_attn.sinks"):
        yield f"{_block(name)}.attn_sinks.weight", weight
    elif "kv_b_proj" in name and not whole_latents:
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        keys, values = weight.view(heads, -1, weight.shape[1]).split((nope, config["v_head_dim"]), dim=1)
        yield f"{_block(name)}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"{_block(name)}.attn_v_b.weight", values
    elif ".mlp.experts." in name and config["model_type"] == "gpt_oss":
        yield from _gpt_oss_experts(name, weight)
    else:
        yield name, weight


def _block(name: str) -> str:
    return f"blk.{name.split('.')[2]}"


def _gpt_oss_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """gate and up of an expert are every second column."""
    prefix, suffix = _block(name), "bias" if name.endswith("_bias") else "weight"
    rows = weight if suffix == "bias" else weight.transpose(1, 2)
    if "down_proj" in name:
        yield f"{prefix}.ffn_down_exps.{suffix}", rows
    else:
        yield f"{prefix}.ffn_gate_exps.{suffix}", rows[:, ::2]
        yield f"{prefix}.ffn_up_exps.{suffix}", rows[:, 1::2]


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys below the architecture's name that not every family has. None: no such key."""
    kind, keys = config["model_type"], dict[str, Any]()
    rope = config.get("rope_parameters") or {}
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "cohere2"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if kind in ("gemma2", "gemma3_text") and config["final_logit_softcapping"]:
        keys["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if kind == "gemma2":
        keys["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
    if kind == "gemma3_text":
        keys["attention.sliding_window_pattern"] = (
            "bool",
            [layer_type != "full_attention" for layer_type in config["layer_types"]],
        )
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if kind == "cohere2":
        keys |= {"logit_scale": float(config["logit_scale"]), "attention.layer_norm_epsilon": config["layer_norm_eps"]}
        keys["attention.sliding_window_pattern"] = (
            "bool",
            [layer_type != "full_attention" for layer_type in config["layer_types"]],
        )
    if kind in ("olmo3", "exaone4") and config["sliding_window"]:
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = (
            "bool",
            [layer_type != "full_attention" for layer_type in config["layer_types"]],
        )
    if kind == "starcoder2":
        keys["attention.layer_norm_epsilon"] = config["norm_epsilon"]
    if kind == "phi3":
        keys["attention.sliding_window"] = config["sliding_window"] or 0
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope":
            keys["rope.scaling.attn_factor"] = 1.25
    if kind == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        keys["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if kind == "minimax_m2":
        keys |= {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2}
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    return keys | (_routed(config) if "n_routed_experts" in config else {}) | _latent(config)


def _routed(config: Mapping[str, Any]) -> dict[str, Any]:
    sigmoid = config["model_type"] != "deepseek_v2"
    return {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]) and sigmoid,
        "expert_group_count": config.get("n_group") or 1,
        "expert_group_used_count": config.get("topk_group") or 1,
        "expert_gating_func": 2 if sigmoid else 1,
        "leading_dense_block_count": config.get("first_k_dense_replace") or 0,
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    if "kv_lora_rank" not in config:
        return {}
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
    }
    if config["q_lora_rank"] is not None:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if mscale := (config["rope_parameters"] or {}).get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * mscale
    return keys
