from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_ropes import ropes_listed
from workers.models.families.layer_windows import windows_by_layer

FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    windows=windows_by_layer,
    ropes=ropes_listed,
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
