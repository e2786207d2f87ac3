"""The seconds a request takes on a candidate or a pair: what `slo` weighs, and what every decision is held against.

decided ──overhead──▶ ──queue──▶ ──load──▶ ──compute──▶ first token ──transfer──▶ second ──step──▶ ... ──step──▶ last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from router.policies.base import Candidate, Decision, RequestView
from router.policies.table import Candidates, Floats, named


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of a decision. `num_cached_tokens` are those that its reader has, `num_host_tokens` of them on
    its host: loading them takes `load_s`. Seconds to the first token are from the decision on; `transfer_s` is what the
    second token waits for its KV."""

    ttft_s: float
    tpot_s: float
    transfer_s: float
    num_cached_tokens: int
    num_host_tokens: int = 0
    load_s: float = 0.0


Numbers = TypeVar("Numbers", float, Floats)
"""One candidate's, or an array of all of theirs."""


class LineOf(Protocol[Numbers]):
    @property
    def each_s(self) -> Numbers: ...
    def __call__(self, amount: Numbers) -> Numbers: ...


class KnownOf(Protocol[Numbers]):
    """A `Candidate`, or `Candidates`."""

    @property
    def num_cached_tokens(self) -> Numbers: ...
    @property
    def num_host_tokens(self) -> Numbers: ...
    @property
    def num_requests(self) -> Numbers: ...
    @property
    def queued_prefill_tokens(self) -> Numbers: ...
    @property
    def reading(self) -> LineOf[Numbers]: ...
    @property
    def loading(self) -> LineOf[Numbers]: ...
    @property
    def stepping(self) -> LineOf[Numbers]: ...


def num_uncached(view: RequestView, candidate: KnownOf[Numbers]) -> Numbers:
    return view.num_tokens - candidate.num_cached_tokens


def num_off_device(view: RequestView, candidate: KnownOf[Numbers]) -> Numbers:
    """What needs room on the device, wherever it comes from."""
    return num_uncached(view, candidate) + candidate.num_host_tokens


def load_s(candidate: KnownOf[Numbers]) -> Numbers:
    """Until what its host has is on the device; a worker computes instead where that takes less."""
    num_tokens = candidate.num_host_tokens
    return least(candidate.loading(num_tokens), candidate.reading.each_s * num_tokens)


def ttft_s(view: RequestView, reader: KnownOf[Numbers]) -> Numbers:
    """To the first token, behind what the reader has to read already."""
    return reader.reading(reader.queued_prefill_tokens + num_uncached(view, reader)) + load_s(reader)


def tpot_s(writer: KnownOf[Numbers]) -> Numbers:
    """Between tokens, with one sequence more than there are."""
    return writer.stepping(writer.num_requests + 1)


def least(one: Numbers, other: Numbers) -> Numbers:
    """The smaller one, of numbers as of arrays."""
    if isinstance(one, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def transfer_s(view: RequestView, readers: Sequence[str], writers: Candidates) -> Floats:
    """[readers, writers]: how long an answer is held up for its KV, which is what the writer's device lacks, over the
    lane between the two."""
    num_bytes = _handed_bytes(view, writers)
    unmeasured = writers.receiving(num_bytes)
    seconds = np.empty((len(readers), len(writers)))
    for row, reader in zip(seconds, readers, strict=True):
        if ways := view.lanes.get(reader):
            lines = ways.lines(writers.crew)
            np.multiply(lines.each_s, num_bytes, out=row)
            row += lines.fixed_s
            np.copyto(row, unmeasured, where=np.isnan(row))
        else:
            row[:] = unmeasured
    return seconds


def _handed_bytes(view: RequestView, writer: KnownOf[Numbers]) -> Numbers:
    """Bytes of KV that it needs from a reader."""
    return num_off_device(view, writer) / view.block_size * view.block_bytes


def outlook(view: RequestView, candidates: Sequence[Candidate], decision: Decision) -> Outlook:
    """What to expect of a decision, whatever policy made it."""
    writer = named(candidates, decision.decode)
    reader = writer if decision.prefill is None else named(candidates, decision.prefill)
    handing = 0.0
    if reader is not writer:
        ways = view.lanes.get(reader.worker_id)
        lane = writer.receiving if ways is None else ways.get(writer.worker_id, writer.receiving)
        handing = lane(_handed_bytes(view, writer))
    return Outlook(
        ttft_s=ttft_s(view, reader),
        tpot_s=tpot_s(writer),
        transfer_s=handing,
        num_cached_tokens=reader.num_cached_tokens,
        num_host_tokens=reader.num_host_tokens,
        load_s=load_s(reader),
    )
