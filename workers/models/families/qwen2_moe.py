from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.experts_config import qwen2_experts
from workers.models.families.family import Family
from workers.models.families.layer_windows import Windows, windows_by_layer


def windows(config: Fields, num_layers: int) -> Windows:
    """`layer_types` names them, else they are every second layer's, from the first to before `max_window_layers`."""
    if config.texts("layer_types") or not config.flag("use_sliding_window"):
        return windows_by_layer(config, num_layers)
    window, end = config.integer_or("sliding_window", 4096), config.integer_or("max_window_layers", 28, minimum=0)
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(num_layers))


FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    windows=windows,
    experts=qwen2_experts,
    reads=frozenset({"num_experts", "num_local_experts"}),
    qkv_bias=True,
)
