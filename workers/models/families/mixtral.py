from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.experts_config import mixtral_experts
from workers.models.families.family import Family
from workers.models.families.layer_windows import Windows


def windows(config: Fields, num_layers: int) -> Windows:
    """Every layer has the same window, or, where the field is absent, none."""
    return (config.integer_or("sliding_window", None),) * num_layers


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral",
    windows=windows,
    experts=mixtral_experts,
    reads=frozenset({"num_local_experts"}),
)
