from __future__ import annotations

from workers.models.families.experts_config import glm4_experts
from workers.models.families.family import Family

FAMILY = Family(
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
