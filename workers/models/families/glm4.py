from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.traits import NormKind, NormPlaces, TensorNames

FAMILY = Family(
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
