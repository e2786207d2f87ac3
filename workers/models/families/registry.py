"""The supported model families, and the lookup by config.json."""

from __future__ import annotations

from protos.errors import UnsupportedModel
from protos.model_files.fields import Fields
from workers.models.families.dense_families import DENSE
from workers.models.families.family import Family
from workers.models.families.mixture_families import MIXTURES

FAMILIES: tuple[Family, ...] = (*DENSE, *MIXTURES)
BY_NAME = {family.name: family for family in FAMILIES}


def is_ours(config: Fields) -> bool:
    """Whether Baton computes the model's layers itself."""
    return _family(config) is not None


def family_of(config: Fields) -> Family:
    """The family that config.json names in `architectures`, or in `model_type` when there is no such list."""
    found = _family(config)
    if found is not None:
        return found
    named = config.texts("architectures")
    what = f"architectures {list(named)}" if named else f"model_type {config.raw('model_type')!r}"
    architectures = ", ".join(family.architecture for family in FAMILIES)
    models = ", ".join(family.models for family in FAMILIES)
    raise UnsupportedModel(
        f"{config.where}: {what} is not supported: known are {architectures} ({models}; for text)",
        param="architectures",
    )


def _family(config: Fields) -> Family | None:
    named = config.texts("architectures")
    for family in FAMILIES:
        stem = family.architecture.removesuffix("ForCausalLM")
        if not named and config.text_or("model_type", "") == family.name:
            return family
        if len(named) == 1 and named[0] in (family.architecture, f"{stem}Model", f"{stem}TextModel"):
            return family
    return None
