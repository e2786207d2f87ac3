from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.traits import NormKind, TensorNames

FAMILY = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    models="Arcee AFM-4.5B",
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"hidden_act": "relu2"},
    norm=NormKind(eps=1e-5),
    tensors=TensorNames(gate_up=("up_proj",)),
    gated=False,
)
