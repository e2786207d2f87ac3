from __future__ import annotations

from protos.errors import UnsupportedModel
from protos.model_files.fields import Fields
from workers.models.families.experts_config import minimax_m2_experts
from workers.models.families.family import Family
from workers.models.families.layer_windows import Windows, no_windows

_FULL = 1


def windows(config: Fields, num_layers: int) -> Windows:
    """None. `attn_type_list` of published files may name layers with linear attention, as MiniMax-01 has them."""
    kinds = config.raw("attn_type_list")
    if kinds is not None and kinds != [_FULL] * num_layers:
        raise UnsupportedModel(
            f"{config.where}: attn_type_list is {kinds!r}: only {_FULL} for each of {num_layers} layers is served",
            param="attn_type_list",
        )
    return no_windows(config, num_layers)


FAMILY = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    windows=windows,
    experts=minimax_m2_experts,
    reads=frozenset({"num_local_experts", "partial_rotary_factor"}),
    defaults={"rope_theta": 5_000_000.0, "num_key_value_heads": 8},
    rotary_dim_field="rotary_dim",
    qk_norm="all",
    head_dim=128,
)
