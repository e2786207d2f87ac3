"""Totals of a pool's workers since the router's start, removed ones included. They only grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from protos.values import HostLoad, SpeculationLoad, WorkerLoad
from router.fleet.member import Member

LabelledNumbers = Mapping[tuple[str, ...], float]
"""Numbers by the values of their labels."""
LoadNumbers = Callable[[WorkerLoad], LabelledNumbers]
LoadCounter = tuple[str, str, LoadNumbers, Sequence[str]]
"""Name, text, numbers that grow during a worker's life, and labels."""
LoadCounts = dict[str, dict[tuple[str, ...], float]]
"""Numbers by counter, and then by pool and labels."""


@dataclass(slots=True)
class PoolTotals:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_losses: int = 0
    num_pauses: int = 0


def number(name: str) -> LoadNumbers:
    value_of = attrgetter(name)
    return lambda load: {(): value_of(load)}


def host_number(name: str) -> LoadNumbers:
    value_of = attrgetter(name)
    return lambda load: {(): value_of(load.host or _NO_HOST)}


def lane_number(name: str) -> LoadNumbers:
    value_of = attrgetter(name)
    return lambda load: {(lane.transport, lane.reason): value_of(lane) for lane in load.lanes}


def _speculation(name: str) -> LoadNumbers:
    value_of = attrgetter(name)
    return lambda load: {(): value_of(load.speculation or _NO_SPECULATION)}


def _drafts(name: str) -> LoadNumbers:
    counts_of = attrgetter(name)
    return lambda load: {
        (drafts.source, str(position)): count
        for drafts in (load.speculation or _NO_SPECULATION).sources
        for position, count in enumerate(counts_of(drafts), 1)
    }


_NO_HOST, _NO_SPECULATION = HostLoad(), SpeculationLoad()
LANE_LABELS = ("transport", "reason")
_DRAFT_LABELS = ("source", "position")
COUNTERS: Sequence[LoadCounter] = (
    ("output_tokens", "Tokens that this pool reported to all gateways", number("num_output_tokens"), ()),
    ("transfer_bytes", "KV bytes sent or received", number("transfer_bytes"), ()),
    ("transfer_seconds", "Seconds KV spent on its way", number("transfer_s"), ()),
    ("transfer_hidden_seconds", "Of those, seconds in which its prompt was still being computed",
     number("transfer_hidden_s"), ()),
    ("lanes_opened", "Lanes opened", lane_number("num_opened"), LANE_LABELS),
    ("lanes_lost", "Lanes lost", lane_number("num_lost"), LANE_LABELS),
    ("lanes_stuck", "Lanes lost because nothing moved on them", lane_number("num_stuck"), LANE_LABELS),
    ("lanes_corrupt", "Lanes lost because a checksum was wrong", lane_number("num_corrupt"), LANE_LABELS),
    ("host_hit_tokens", "Prompt tokens loaded from host memory, not computed", host_number("num_hit_tokens"), ()),
    ("host_passed_tokens", "Prompt tokens in host memory that were computed, since that took less",
     host_number("num_passed_tokens"), ()),
    ("host_stored_blocks", "KV blocks copied to host memory", host_number("num_stored"), ()),
    ("host_evicted_blocks", "KV blocks dropped from host memory", host_number("num_evicted"), ()),
    ("host_loaded_bytes", "KV bytes loaded from host memory", host_number("loaded_bytes"), ()),
    ("host_load_seconds", "Seconds that took", host_number("load_s"), ()),
    ("speculation_rows", "Rows of sequences that may speculate, in all steps", _speculation("num_rows"), ()),
    ("speculation_tokens", "Tokens that these rows brought", _speculation("num_tokens"), ()),
    ("speculation_spared_seconds", "Seconds of steps that accepted drafts spared", _speculation("spared_s"), ()),
    ("speculation_spent_seconds", "Seconds by which steps with drafts were longer, and of the proposers' models",
     _speculation("spent_s"), ()),
    ("speculation_drafted", "Drafted tokens that were verified, by their position in a draft, from 1 on",
     _drafts("drafted_at"), _DRAFT_LABELS),
    ("speculation_accepted", "Of those, accepted ones", _drafts("accepted_at"), _DRAFT_LABELS),
)  # fmt: skip


class LoadTotals:
    def __init__(self) -> None:
        self.counts: LoadCounts = {name: {} for name, *_ in COUNTERS}

    def credit(self, member: Member) -> None:
        """Adds what the worker did since the last call. Call it before the worker's role or life changes."""
        before, member.credited = member.credited, member.load
        if member.role is None or before is member.load:
            return
        for name, _, numbers, _ in COUNTERS:
            earlier, counts = numbers(before), self.counts[name]
            for labels, value in numbers(member.load).items():
                key = (member.role, *labels)
                counts[key] = counts.get(key, 0) + max(0, value - earlier.get(labels, 0))
