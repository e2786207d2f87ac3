from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.traits import NormKind

FAMILY = Family(
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
