"""Families with experts, some of them with latents in place of keys and values."""

from __future__ import annotations

from dataclasses import replace

from protos.model_files.fields import Fields
from workers.models.families.experts_config import (
    ExpertsConfig,
    deepseek_v2_experts,
    deepseek_v3_experts,
    glm4_experts,
    gpt_oss_experts,
    minimax_m2_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
)
from workers.models.families.family import Family
from workers.models.families.latent_config import latent_scales, read_latent
from workers.models.families.layer_windows import Windows, no_windows, windows_by_layer


def _mixtral_windows(config: Fields, num_layers: int) -> Windows:
    """Every layer has the same window; none if the field is absent."""
    return (config.integer_or("sliding_window", None),) * num_layers


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral",
    windows=_mixtral_windows,
    experts=mixtral_experts,
    reads=frozenset({"num_local_experts"}),
)


def _qwen2_moe_windows(config: Fields, num_layers: int) -> Windows:
    """The layers of `layer_types`, else every second layer from the first to before `max_window_layers`."""
    if config.texts("layer_types") or not config.flag("use_sliding_window"):
        return windows_by_layer(config, num_layers)
    window, end = config.integer_or("sliding_window", 4096), config.integer_or("max_window_layers", 28, minimum=0)
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(num_layers))


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    windows=_qwen2_moe_windows,
    experts=qwen2_experts,
    reads=frozenset({"num_experts", "num_local_experts"}),
    qkv_bias=True,
)


def _qwen3_moe_windows(config: Fields, num_layers: int) -> Windows:
    window = config.integer_or("sliding_window", 4096) if config.flag("use_sliding_window") else None
    return (window,) * num_layers


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-MoE",
    windows=_qwen3_moe_windows,
    experts=qwen3_experts,
    reads=frozenset({"attention_bias", "num_experts", "num_local_experts"}),
    qk_norm="head",
)

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.6",
    experts=glm4_experts,
    reads=frozenset({"attention_bias", "n_routed_experts", "partial_rotary_factor"}),
    defaults={"partial_rotary_factor": 0.5},
    qk_norm="head",
    qk_norm_field="use_qk_norm",
    o_bias=False,
)


def _glm4_moe_lite_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    """The sparse layers of `mlp_layer_types`; by default all but the first."""
    experts, types = glm4_experts(config, num_layers), config.texts("mlp_layer_types")
    if experts is None or not types:
        return experts
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise config.wrong("mlp_layer_types", f"dense or sparse for each of {num_layers} layers")
    return replace(experts, sparse=tuple(kind == "sparse" for kind in types))


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    latent=read_latent,
    scales=latent_scales,
    experts=_glm4_moe_lite_experts,
    reads=frozenset({"n_routed_experts"}),
    defaults={
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
    head_dim=64,
)


def _gpt_oss_windows(config: Fields, num_layers: int) -> Windows:
    """The layers of `layer_types`, else every second layer from the first."""
    default = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers))
    types, window = config.texts("layer_types") or default, config.integer_or("sliding_window", 128)
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise config.wrong("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers", types)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss",
    windows=_gpt_oss_windows,
    experts=gpt_oss_experts,
    reads=frozenset({"attention_bias", "num_local_experts"}),
    defaults={"attention_bias": True},
    sinks=True,
    head_dim=64,
)

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    models="DeepSeek-V2, V2-Lite",
    latent=read_latent,
    scales=latent_scales,
    experts=deepseek_v2_experts,
    reads=frozenset({"n_routed_experts"}),
    head_dim=64,
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, R1",
    latent=read_latent,
    scales=latent_scales,
    experts=deepseek_v3_experts,
    reads=frozenset({"n_routed_experts"}),
    head_dim=64,
)

_FULL = 1


def _minimax_m2_windows(config: Fields, num_layers: int) -> Windows:
    """Returns no windows. `attn_type_list` of published files may name linear attention, as in MiniMax-01."""
    kinds = config.raw("attn_type_list")
    if kinds is not None and kinds != [_FULL] * num_layers:
        raise config.unserved("attn_type_list", f"only {_FULL} for each of {num_layers} layers is")
    return no_windows(config, num_layers)


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    windows=_minimax_m2_windows,
    experts=minimax_m2_experts,
    reads=frozenset({"num_local_experts", "partial_rotary_factor"}),
    defaults={"rope_theta": 5_000_000.0, "num_key_value_heads": 8},
    rotary_dim_field="rotary_dim",
    qk_norm="all",
    head_dim=128,
)

MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, GLM4_MOE_LITE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, MINIMAX_M2)
