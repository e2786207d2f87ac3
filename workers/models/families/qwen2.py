from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_windows import windows_by_layer

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    windows=windows_by_layer,
    qkv_bias=True,
)
