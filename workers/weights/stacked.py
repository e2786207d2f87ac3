"""Experts that a checkpoint stacks in one tensor, as tensors of their own: `experts.3.gate_proj.weight`.

    experts.gate_up_proj            [X, 2 I, E]      gate, then up           transformers 5
    experts.down_proj               [X, E, I]
    experts.gate_up_proj            [X, E, 2 I]      gate and up in turn     gpt-oss, with `gate_up_proj_bias` [X, 2 I]
    experts.down_proj               [X, I, E]
    experts.gate_up_proj_blocks     [X, 2 I, G, 16]  gate and up in turn     gpt-oss in MXFP4, and `_scales` [X, 2 I, G]
    experts.down_proj_blocks        [X, E, G, 16]

Legend: X experts, E hidden size, I expert size, G blocks of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.weights.source import StoredTensor, WeightSource

if TYPE_CHECKING:
    import torch

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slab:
    """An expert's rows of `stacked`: every `step`-th from `first` to `stop`."""

    stacked: str
    expert: int
    first: int
    step: int
    stop: int
    transposed: bool  # the stack has inputs before outputs


def unstacked(source: WeightSource) -> WeightSource:
    """Divides stacked tensors of `source`; returns `source` without any."""
    return UnstackedSource(source) if any(map(_STACKED.fullmatch, source.names())) else source


class UnstackedSource:
    """The tensors of `source`, with each stack divided into experts."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        names = frozenset(source.names())
        matches = {name: match for name in sorted(names) if (match := _STACKED.fullmatch(name))}
        self._slabs = {
            name: slab
            for stacked, match in matches.items()
            for name, slab in _slabs(stacked, match, source.describe(stacked).shape, names)
        }
        whole = {slab.stacked for slab in self._slabs.values()}
        self._names = (names - whole) | self._slabs.keys()

    def names(self) -> Collection[str]:
        return self._names

    def describe(self, name: str) -> StoredTensor:
        slab = self._slabs.get(name)
        if slab is None:
            return self._source.describe(name)
        stored = self._source.describe(slab.stacked)
        count = len(range(slab.first, slab.stop, slab.step))
        others = stored.shape[1] if slab.transposed else None
        shape = (count, others) if others is not None else (count, *stored.shape[2:])
        rows = stored.shape[0] * stored.shape[2 if slab.transposed else 1]
        return StoredTensor(shape=shape, dtype=stored.dtype, num_bytes=stored.num_bytes * count // max(rows, 1))

    def read(self, name: str, dim: int, part: slice) -> torch.Tensor:
        slab = self._slabs.get(name)
        if slab is None:
            return self._source.read(name, dim, part)
        expert = self._source.read(slab.stacked, 0, slice(slab.expert, slab.expert + 1))[0]
        rows = (expert.T if slab.transposed else expert)[slab.first : slab.stop : slab.step]
        return rows[(*[slice(None)] * dim, part)]


def _slabs(
    stacked: str, match: re.Match[str], shape: tuple[int, ...], names: frozenset[str]
) -> Iterator[tuple[str, _Slab]]:
    prefix, projection, kind = match.groups()
    in_turn = bool(kind) or f"{prefix}.{projection}_bias" in names
    transposed = in_turn and not kind
    if len(shape) < (2 if kind == "_bias" else 3):
        return
    size = shape[2 if transposed else 1]
    if projection == "down_proj":
        parts = {"down_proj": (0, 1, size)}
    elif in_turn:
        parts = {"gate_proj": (0, 2, size), "up_proj": (1, 2, size)}
    else:
        parts = {"gate_proj": (0, 1, size // 2), "up_proj": (size // 2, 1, size)}
    for expert in range(shape[0]):
        for name, (first, step, stop) in parts.items():
            yield (
                f"{prefix}.{expert}.{name}.{_SUFFIXES[kind]}",
                _Slab(stacked=stacked, expert=expert, first=first, step=step, stop=stop, transposed=transposed),
            )
