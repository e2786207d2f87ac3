from __future__ import annotations

from dataclasses import replace

from workers.models.families.layer_ropes import ropes_of_one_base
from workers.models.families.layer_windows import windows_by_pattern
from workers.models.families.olmo2 import FAMILY as OLMO2

FAMILY = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    windows=windows_by_pattern,
    ropes=ropes_of_one_base,
    defaults={"rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
)
