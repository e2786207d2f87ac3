from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.layer_windows import windows_by_pattern
from workers.models.families.traits import NormKind, NormPlaces, Scales

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


FAMILY = Family(
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
