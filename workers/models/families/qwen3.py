from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_windows import windows_by_layer

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    windows=windows_by_layer,
    reads=frozenset({"attention_bias"}),
    qk_norm="head",
    head_dim=128,
)
