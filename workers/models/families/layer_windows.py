"""How families write sliding windows: one entry for each layer."""

from __future__ import annotations

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields

Windows = tuple[int | None, ...]
"""Per layer: how many positions a token sees, itself included; None sees all."""


def no_windows(config: Fields, num_layers: int) -> Windows:
    if "sliding_window" in config or "layer_types" in config:
        raise config.unserved("sliding_window", "this family has no windows, and no layer_types")
    return (None,) * num_layers


def one_window(config: Fields, num_layers: int) -> Windows:
    """Every layer has the same window. An absent field means 4096, an explicit null means none."""
    if "layer_types" in config:
        raise config.unserved("layer_types", "this family has none")
    absent = None if config.has_null("sliding_window") else 4096
    return (config.integer_or("sliding_window", absent),) * num_layers


def windows_by_layer(config: Fields, num_layers: int) -> Windows:
    """Reads `layer_types`; by default the layers from `max_window_layers` on, if `use_sliding_window` is true."""
    window = config.integer_or("sliding_window", 4096) if config.flag("use_sliding_window") else None
    types = _layer_types(config, num_layers)
    if not types:
        first = config.integer_or("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in types:
        raise BadCheckpoint(f"{config.where}: layer_types has sliding layers, use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def windows_by_pattern(config: Fields, num_layers: int) -> Windows:
    """Reads `layer_types`; by default each `sliding_window_pattern`-th layer has no window."""
    window = config.integer_or("sliding_window", None)
    types = _layer_types(config, num_layers)
    if types:
        if window is None and "sliding_attention" in types:
            raise BadCheckpoint(f"{config.where}: layer_types has sliding layers, sliding_window is missing")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    pattern = config.integer("sliding_window_pattern")
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


def _layer_types(config: Fields, num_layers: int) -> tuple[str, ...]:
    """The types that config.json names; () if it names none."""
    types = config.texts("layer_types")
    if types and len(types) != num_layers:
        raise BadCheckpoint(f"{config.where}: layer_types has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{config.where}: layer type {kind!r} is not supported", param="layer_types")
    return types
