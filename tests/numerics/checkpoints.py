"""Tiny random checkpoints of every family, written by transformers itself: the oracle and Baton read the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

SWIGLU_LIMIT = 1.0 if Version(transformers.__version__) >= Version("5.23") else 7.0
"""The limit of gpt-oss. Earlier versions, which the GPU machine has, ignore the checkpoint's."""

VOCAB_SIZE = 160
MAX_POSITIONS = 256

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}

MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 24}),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 5}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "swiglu_limit": SWIGLU_LIMIT,
            "max_position_embeddings": 256,
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {**_LATENT, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**_LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"sliding_window": 24}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, {"num_hidden_layers": 4, "sliding_window": 5}),
    "exaone4": (
        transformers.Exaone4Config,
        transformers.Exaone4ForCausalLM,
        {"sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM, {"head_dim": 24}),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM, {"head_dim": 24, "use_bias": True}),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {"head_dim": 24, "rope_parameters": MINISTRAL_ROPE},
    ),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM, {}),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {
            "attention_multiplier": 0.03,
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.22,
        },
    ),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {"head_dim": 24}),
    "smollm3": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2},
    ),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, {}),
    "cohere2": (
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {"sliding_window": 5, "sliding_window_pattern": 2},
    ),
}


_WINDOWED: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}

THROUGH_TRANSFORMERS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "nemotron": (transformers.NemotronConfig, transformers.NemotronForCausalLM, {}),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM, {**_WINDOWED, "head_dim": 16}),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, {"num_experts": 8, "num_experts_per_tok": 3}),
    "diffllama": (transformers.DiffLlamaConfig, transformers.DiffLlamaForCausalLM, {}),
    "granitemoe_swa": (
        transformers.GraniteMoeSWAConfig,
        transformers.GraniteMoeSWAForCausalLM,
        {"num_local_experts": 6, "sliding_window": 9},
    ),
    "minicpm3": (
        transformers.MiniCPM3Config,
        transformers.MiniCPM3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.0, 1.5, 2.0, 3.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
"""Architectures that are not Baton's own. Keys of MiniCPM3's heads are longer than their values."""


def make_checkpoint(
    family: str, path: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> transformers.PreTrainedModel:
    """Writes a random fp32 checkpoint of `family` (a key of FAMILIES) to the folder `path`, made if need be.

    `overrides` replace fields of the transformers config. Norm weights and biases are random too: ones and zeros
    would hide a tensor that is not applied. Returns the transformers model, in eval mode, as the oracle.
    """
    config_class, model_class, defaults = (FAMILIES | THROUGH_TRANSFORMERS)[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config_class(**(SHAPE | defaults | overrides)))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                make_uneven(model, name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
                buffer[-1] = buffer[0]
    model.save_pretrained(path, max_shard_size=max_shard_size)
    evaluated: transformers.PreTrainedModel = model.eval()
    return evaluated


def make_uneven(model: Any, name: str, router_XE: torch.nn.Parameter) -> None:
    """Gives experts uneven popularity, and a tie: the last one is a copy of the first."""
    torch.nn.init.normal_(router_XE, std=0.3)
    with torch.no_grad():
        router_XE[1] *= 3
        router_XE[2] *= 0.1
        experts = model.get_submodule(name.rsplit(".", 2)[0]).experts
        for tensor in (router_XE, *experts.parameters()):
            tensor[-1] = tensor[0]
