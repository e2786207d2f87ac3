from __future__ import annotations

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from workers.models.families.experts_config import gpt_oss_experts
from workers.models.families.family import Family
from workers.models.families.layer_windows import Windows


def windows(config: Fields, num_layers: int) -> Windows:
    """`layer_types` names the layers that have one, else every second one has, from the first on."""
    default = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers))
    types, window = config.texts("layer_types") or default, config.integer_or("sliding_window", 128)
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise BadCheckpoint(
            f"{config.where}: layer_types is {list(types)}: it must have 'full_attention' or 'sliding_attention' for "
            f"each of {num_layers} layers",
            param="layer_types",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss",
    windows=windows,
    experts=gpt_oss_experts,
    reads=frozenset({"attention_bias", "num_local_experts"}),
    defaults={"attention_bias": True},
    sinks=True,
    head_dim=64,
)
