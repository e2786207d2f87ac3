from __future__ import annotations

from workers.models.families.experts_config import deepseek_v2_experts
from workers.models.families.family import Family
from workers.models.families.latent_config import latent_scales, read_latent

FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    models="DeepSeek-V2, V2-Lite",
    latent=read_latent,
    scales=latent_scales,
    experts=deepseek_v2_experts,
    reads=frozenset({"n_routed_experts"}),
    head_dim=64,
)
