from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_windows import one_window

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    models="Mistral",
    windows=one_window,
)
