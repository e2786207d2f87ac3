from __future__ import annotations

from workers.models.families.family import Family

FAMILY = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS",
    reads=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"attention_bias": True, "num_key_value_heads": 8},
    o_bias=False,
    head_dim=128,
)
