from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.layer_ropes import Ropes, RopeSizes, one_rope, rope_where_windowed
from workers.models.families.layer_windows import Windows, windows_by_pattern
from workers.models.families.traits import NORMS_AFTER, NormKind


def windows(config: Fields, num_layers: int) -> Windows:
    """A null `sliding_window`, as of the small models: none."""
    return windows_by_pattern(config, num_layers) if "sliding_window" in config else (None,) * num_layers


def ropes(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """Where the model has windows, layers without one do not rotate."""
    return (rope_where_windowed if "sliding_window" in config else one_rope)(config, windows, sizes)


FAMILY = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4",
    windows=windows,
    ropes=ropes,
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
    norm=NormKind(eps=1e-5),
    places=NORMS_AFTER,
    qk_norm="head",
)
