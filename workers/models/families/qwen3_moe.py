from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.experts_config import qwen3_experts
from workers.models.families.family import Family
from workers.models.families.layer_windows import Windows


def windows(config: Fields, num_layers: int) -> Windows:
    window = config.integer_or("sliding_window", 4096) if config.flag("use_sliding_window") else None
    return (window,) * num_layers


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-MoE",
    windows=windows,
    experts=qwen3_experts,
    reads=frozenset({"attention_bias", "num_experts", "num_local_experts"}),
    qk_norm="head",
)
