from __future__ import annotations

from workers.models.families.family import Family

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2 and 3",
    reads=frozenset({"attention_bias", "mlp_bias"}),
)
