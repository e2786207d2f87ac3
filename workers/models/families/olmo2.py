from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.traits import NORMS_AFTER, NormKind

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    reads=frozenset({"attention_bias"}),
    norm=NormKind(eps=1e-5, wide=True),
    places=NORMS_AFTER,
    qk_norm="all",
)
