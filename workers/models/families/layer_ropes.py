"""How families give ropes to their layers: one entry for each layer, None where a layer does not rotate. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields
from workers.models.families.layer_windows import Windows
from workers.models.rope_kinds import Rope, read_rope

Ropes = tuple[Rope | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSizes:
    rotary_dim: int  # dimensions of a head that turn
    max_position: int
    partial: bool  # the family reads partial_rotary_factor


def one_rope(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    return (_rope(config, sizes),) * len(windows)


def rope_where_windowed(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """Layers that see everything do not rotate."""
    rope = _rope(config, sizes)
    return tuple(None if window is None else rope for window in windows)


def ropes_listed(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """Reads `no_rope_layers`, with 1 for a layer that rotates; by default each `no_rope_layer_interval`-th layer does
    not rotate."""
    rope, interval = _rope(config, sizes), config.integer_or("no_rope_layer_interval", 4)
    listed = config.raw("no_rope_layers")
    if listed is None:
        listed = [int((layer + 1) % interval != 0) for layer in range(len(windows))]
    if not isinstance(listed, list) or len(listed) < len(windows) or any(each not in (0, 1) for each in listed):
        raise config.wrong("no_rope_layers", f"a list of 0 or 1 for each of {len(windows)} layers")
    return tuple(rope if turns else None for turns, _ in zip(listed, windows, strict=False))


def ropes_by_type(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """Gives layers with a window their own rope: `rope_parameters` by layer type (transformers 5), or
    `rope_local_base_freq` beside `rope_theta`, with the scaling of the other layers."""
    by_type = config.inner("rope_parameters")
    if "full_attention" in by_type or "sliding_attention" in by_type:
        wide = _rope(config.replaced(rope_parameters=by_type.raw("full_attention")), sizes)
        local = {"rope_theta": 10_000.0, **(by_type.raw("sliding_attention") or {})}
        near = _rope(config.replaced(rope_parameters=local), sizes)
    else:
        wide = _rope(config, sizes)
        near = Rope(theta=config.number_or("rope_local_base_freq", 10_000.0))
    return tuple(wide if window is None else near for window in windows)


def ropes_of_one_base(config: Fields, windows: Windows, sizes: RopeSizes) -> Ropes:
    """Gives layers with a window the same base, unscaled."""
    return ropes_by_type(config.replaced(rope_local_base_freq=config.number("rope_theta")), windows, sizes)


def _rope(config: Fields, sizes: RopeSizes) -> Rope:
    return read_rope(config, head_dim=sizes.rotary_dim, max_position=sizes.max_position, partial=sizes.partial)
