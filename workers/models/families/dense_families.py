"""Families whose layers all have one MLP."""

from __future__ import annotations

from dataclasses import replace

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.layer_ropes import (
    Ropes,
    RopeSizes,
    one_rope,
    rope_where_windowed,
    ropes_by_type,
    ropes_listed,
    ropes_of_one_base,
)
from workers.models.families.layer_windows import Windows, one_window, windows_by_layer, windows_by_pattern
from workers.models.families.traits import NORMS_AFTER, NormKind, NormPlaces, QueryGrowth, Scales, TensorNames
from workers.models.rope_kinds import rope_fields

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2 and 3",
    reads=frozenset({"attention_bias", "mlp_bias"}),
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    models="Mistral",
    windows=one_window,
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    windows=windows_by_layer,
    qkv_bias=True,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    windows=windows_by_layer,
    reads=frozenset({"attention_bias"}),
    qk_norm="head",
    head_dim=128,
)

GEMMA_NORM = NormKind(offset=1.0, wide=True)
GEMMA_PLACES = NormPlaces(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_scales(config: Fields) -> Scales:
    return Scales(
        embedding=config.integer("hidden_size") ** 0.5,
        attention=config.number_or("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=config.number_or("attn_logit_softcapping", 0.0),
        logits_softcap=config.number_or("final_logit_softcapping", 0.0),
    )


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    windows=windows_by_pattern,
    scales=gemma_scales,
    reads=frozenset({"attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}),
    defaults={
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    norm=GEMMA_NORM,
    places=GEMMA_PLACES,
    activation_field="hidden_activation",
)

GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 (text)",
    windows=windows_by_pattern,
    ropes=ropes_by_type,
    scales=gemma_scales,
    reads=frozenset({"attention_bias", "final_logit_softcapping", "query_pre_attn_scalar"}),
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    norm=GEMMA_NORM,
    places=GEMMA_PLACES,
    activation_field="hidden_activation",
    qk_norm="head",
)

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    windows=one_window,
    reads=frozenset({"partial_rotary_factor"}),
    defaults={"original_max_position_embeddings": 4096, "sliding_window": None},
    norm=NormKind(eps=1e-5),
    tensors=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
)

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    reads=frozenset({"attention_bias"}),
    norm=NormKind(eps=1e-5, wide=True),
    places=NORMS_AFTER,
    qk_norm="all",
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    windows=windows_by_pattern,
    ropes=ropes_of_one_base,
    defaults={"rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
)


def _granite_scales(config: Fields) -> Scales:
    return Scales(
        embedding=config.number_or("embedding_multiplier", 1.0),
        residual=config.number_or("residual_multiplier", 1.0),
        attention=config.number_or("attention_multiplier", 1.0),
        logits=1.0 / config.number_or("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    scales=_granite_scales,
    reads=frozenset(
        {
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "mlp_bias",
            "residual_multiplier",
        }
    ),
)

GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414",
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "eos_token_id": [151329, 151336, 151338],
        "partial_rotary_factor": 0.5,
    },
    norm=NormKind(eps=1.5625e-07),
    places=NormPlaces(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    tensors=TensorNames(gate_up=("gate_up_proj",)),
    interleaved_rope=True,
    o_bias=False,
)

SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    windows=windows_by_layer,
    ropes=ropes_listed,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)

STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    windows=one_window,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    norm=NormKind(centred=True, bias=True, eps=1e-5),
    norm_eps_field="norm_epsilon",
    tensors=TensorNames(gate_up=("c_fc",), down="c_proj"),
    gated=False,
    attention_bias_field="use_bias",
    mlp_bias_field="use_bias",
)


COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    models="Command R7B, Command A",
    windows=windows_by_pattern,
    ropes=rope_where_windowed,
    scales=lambda config: Scales(logits=config.number_or("logit_scale", 1.0)),
    reads=frozenset({"attention_bias", "logit_scale"}),
    defaults={
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    norm=NormKind(centred=True, eps=1e-5),
    norm_eps_field="layer_norm_eps",
    places=NormPlaces(before_mlp=None, parallel=True),
    interleaved_rope=True,
)


def _exaone4_windows(config: Fields, num_layers: int) -> Windows:
    """A null `sliding_window`, as of the small models: none."""
    return windows_by_pattern(config, num_layers) if "sliding_window" in config else (None,) * num_layers


def _exaone4_ropes(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """In a model with windows, full layers do not rotate."""
    return (rope_where_windowed if "sliding_window" in config else one_rope)(config, windows, sizes)


EXAONE4 = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4",
    windows=_exaone4_windows,
    ropes=_exaone4_ropes,
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
    norm=NormKind(eps=1e-5),
    places=NORMS_AFTER,
    qk_norm="head",
)

SEED_OSS = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS",
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"attention_bias": True, "num_key_value_heads": 8},
    o_bias=False,
    head_dim=128,
)

ERNIE4_5 = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    models="ERNIE 4.5, dense",
    defaults={"num_key_value_heads": 2, "rope_theta": 500_000.0, "tie_word_embeddings": True},
    norm=NormKind(eps=1e-5),
    interleaved_rope=True,
    attention_bias_field="use_bias",
    mlp_bias_field="use_bias",
    head_dim=128,
)

ARCEE = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    models="Arcee AFM-4.5B",
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"hidden_act": "relu2"},
    norm=NormKind(eps=1e-5),
    tensors=TensorNames(gate_up=("up_proj",)),
    gated=False,
)

_GROWTH, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _ministral3_scales(config: Fields) -> Scales:
    rope = rope_fields(config)
    beta = rope.number_or(_GROWTH, 0.0, above=-1.0)
    return Scales(growth=QueryGrowth(beta=beta, length=rope.integer(_LENGTH)) if beta else None)


MINISTRAL3 = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3, Devstral Small 2",
    windows=one_window,
    scales=_ministral3_scales,
    reads=frozenset({_GROWTH}),
    defaults={
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, _GROWTH: 0.1,
        },
        "sliding_window": None,
    },
    norm=NormKind(eps=1e-5),
    head_dim=128,
)  # fmt: skip

DENSE = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, OLMO3, GRANITE, GLM4, SMOLLM3, STARCODER2, COHERE2,
    EXAONE4, SEED_OSS, ERNIE4_5, ARCEE, MINISTRAL3,
)  # fmt: skip
