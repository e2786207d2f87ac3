from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.layer_windows import one_window
from workers.models.families.traits import NormKind, QueryGrowth, Scales
from workers.models.rope_kinds import rope_fields

_GROWTH, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _scales(config: Fields) -> Scales:
    rope = rope_fields(config)
    beta = rope.number_or(_GROWTH, 0.0, above=-1.0)
    return Scales(growth=QueryGrowth(beta=beta, length=rope.integer(_LENGTH)) if beta else None)


FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3, Devstral Small 2",
    windows=one_window,
    scales=_scales,
    reads=frozenset({_GROWTH}),
    defaults={
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, _GROWTH: 0.1,
        },
        "sliding_window": None,
    },
    norm=NormKind(eps=1e-5),
    head_dim=128,
)  # fmt: skip
