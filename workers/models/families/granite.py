from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.traits import Scales


def _scales(config: Fields) -> Scales:
    return Scales(
        embedding=config.number_or("embedding_multiplier", 1.0),
        residual=config.number_or("residual_multiplier", 1.0),
        attention=config.number_or("attention_multiplier", 1.0),
        logits=1.0 / config.number_or("logits_scaling", 1.0),
    )


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    scales=_scales,
    reads=frozenset(
        {
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "mlp_bias",
            "residual_multiplier",
        }
    ),
)
