from __future__ import annotations

from workers.models.families.base import Family
from workers.models.families.traits import NormKind, NormPlaces

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    reads=frozenset({"attention_bias"}),
    norm=NormKind(eps=1e-5, wide=True),
    places=NormPlaces(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    qk_norm="all",
)
