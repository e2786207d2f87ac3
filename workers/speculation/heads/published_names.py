"""Fills a head with the tensors of its files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import listed
from workers.weights.slots import Slot, in_order
from workers.weights.source import WeightSource

log = logging.getLogger("baton.worker")


def fill_head(path: str, slots: Sequence[Slot], source: WeightSource, *, unused: Collection[str] = ()) -> None:
    """Fills the slots. Raises BadCheckpoint for a tensor that is missing or has another shape, UnsupportedModel for one
    of another type. Tensors that are neither wanted nor in `unused` are logged."""
    names = set(source.names())
    if missing := sorted({slot.name for slot in slots} - names):
        raise BadCheckpoint(
            f"{path} lacks {len(missing)} tensors, the first is {missing[0]!r}: its config.json belongs to another "
            "head, or a shard is missing"
        )
    for slot in slots:
        stored = source.describe(slot.name)
        if stored.shape != slot.shape:
            raise BadCheckpoint(f"{path}: tensor {slot.name!r} is {stored.shape}, its place is {slot.shape}")
        if stored.dtype not in slot.dtypes:
            raise UnsupportedModel(
                f"{path}: tensor {slot.name!r} is stored as {stored.dtype}: it must be one of "
                f"{', '.join(sorted(slot.dtypes))}"
            )
    if others := sorted(names - {slot.name for slot in slots} - set(unused)):
        log.warning("%s: %d tensors are not used: %s", path, len(others), listed(others[:5]))
    for slot in slots:
        read = in_order(source.read(slot.name, slot.dim, slot.part), slot.order)
        if slot.consume is not None:
            slot.consume(read)
        else:
            slot.target.copy_(read)
        if slot.check is not None:
            slot.check(f"{path}: tensor {slot.name!r}", slot.target)
