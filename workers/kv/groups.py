"""Divides a model's layers into groups that free what lies behind their windows. Pure.

Groups share one pool of pages, so all take as much of a page as the largest has layers:

    Gemma 3 4B    29 windowed, 5 full   ▶  6 groups of 5 windowed (one has 4), 1 of 5
    gpt-oss 20B   12 windowed, 12 full  ▶  1 group of 12 windowed, 1 of 12
    Mistral 7B    32 windowed           ▶  1 group of 32
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from protos.values import KVGroup, KVLayout

MAX_GROUPS = 8
"""A step has a table for each group and sequence."""

_MAX_EMPTY = 1 / 6
"""Share of the layers of a model that pages may leave room for in vain, if that makes groups fewer."""


def with_windows(layout: KVLayout, windows: Sequence[int | None]) -> KVLayout:
    """Divides the layers of `layout`, which has one group, by their windows: groups without a window come first.
    Unchanged if no layer has a window, or if more than `MAX_GROUPS` groups would be needed."""
    (whole,) = layout.groups
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    kinds = dict(sorted(kinds.items(), key=lambda kind: kind[0] or 0))
    size = group_size({window: len(layers) for window, layers in kinds.items()})
    if size is None or tuple(kinds) == (None,):
        return layout
    groups = [
        KVGroup(layers=tuple(part), parts=whole.parts, window=window)
        for window, layers in kinds.items()
        for part in _cut(layers, size)
    ]
    return replace(layout, groups=tuple(groups))


def group_size(counts: Mapping[int | None, int]) -> int | None:
    """Returns the number of layers of a group, None if more than `MAX_GROUPS` groups would be needed.

    - `counts`: layers by window, None for layers without a window

    Groups without a window have no empty places, which would take memory for the whole of a long context.
    """
    num_layers, num_full = sum(counts.values()), counts.get(None, 0)
    sizes: list[tuple[float, int]] = []
    for size in range(1, max(counts.values()) + 1):
        num_groups = sum(-(-count // size) for count in counts.values())
        if num_groups <= MAX_GROUPS and num_full % size == 0:
            empty = (num_groups * size - num_layers) / num_layers
            sizes.append((0.0 if empty <= _MAX_EMPTY else empty, size))
    if not sizes:
        return None
    least = min(empty for empty, _ in sizes)
    return max(size for empty, size in sizes if empty == least)


def _cut(layers: Sequence[int], size: int) -> list[Sequence[int]]:
    num_groups = -(-len(layers) // size)
    bounds = [index * len(layers) // num_groups for index in range(num_groups + 1)]
    return [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
