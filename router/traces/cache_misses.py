"""Explains why a prompt was not found in a cache: the first missing block, and why it is missing.

Losses ◀── the feed: what workers removed, and when          Records: what earlier prompts had in common with this one
   └──────────────┬────────────────────────────────────────────────┘
               explain(record) ─▶ Miss: a reason, and a sentence for people
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from protos.chain import Chain
from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockRemoved, Cleared, KVEvent, Tier
from router.routing.decision import cost_figure, shown_unit
from router.traces.request_trace import DecisionRecord, RequestTrace, RequestTraces

MAX_LOSSES = 2**18  # blocks, of all workers together
PLACES = {Tier.DEVICE: "the device", Tier.HOST: "host memory"}
_NONE: Mapping[BlockHash, float] = {}


class EvictionLog:
    """The last `capacity` blocks that workers removed from a tier, with the time of the event. Those of a
    worker that has removed none for longest, such as one that has left, are forgotten first."""

    def __init__(self, capacity: int = MAX_LOSSES) -> None:
        self._capacity = capacity
        self._num_lost = 0
        self._lost: OrderedDict[tuple[str, Tier], OrderedDict[BlockHash, float]] = OrderedDict()  # the latest last
        self._cleared: dict[str, float] = {}

    def observe(self, worker_id: str, events: Sequence[KVEvent], now: float) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                self._remove((worker_id, event.tier), event.hashes, now)
            elif isinstance(event, Cleared):
                self._cleared[worker_id] = now

    def removals(self, worker_id: str, block: BlockHash, *, before: float) -> Sequence[tuple[float, Tier]]:
        known = [(self._lost.get((worker_id, tier), _NONE).get(block), tier) for tier in Tier]
        return sorted((at_s, tier) for at_s, tier in known if at_s is not None and at_s <= before)

    def cleared_s(self, worker_id: str, *, since: float, before: float) -> float | None:
        at_s = self._cleared.get(worker_id)
        return at_s if at_s is not None and since <= at_s <= before else None

    def _remove(self, place: tuple[str, Tier], hashes: Sequence[BlockHash], now: float) -> None:
        lost = self._lost.setdefault(place, OrderedDict())
        self._lost.move_to_end(place)
        self._num_lost -= len(lost)
        for block in hashes:
            lost[block] = now
            lost.move_to_end(block)
        self._num_lost += len(lost)
        while self._num_lost > self._capacity:
            quietest, theirs = next(iter(self._lost.items()))
            theirs.popitem(last=False)
            self._num_lost -= 1
            if not theirs:
                del self._lost[quietest]


class MissKind(StrEnum):
    NOT_COMPUTED = "not computed yet"
    NOT_KEPT = "not kept"
    NOTHING_MISSING = "nothing missing"
    SHORT = "shorter than a block"
    EVENTS_BEHIND = "events behind"
    NOT_LOADED = "not loaded"
    ELSEWHERE = "cached elsewhere"
    EVICTED = "evicted"
    CLEARED = "cleared"
    COMPUTED_ELSEWHERE = "computed elsewhere"
    OTHER_SALT = "other salt"
    NEVER_STORED = "never stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReason:
    """One reason, with the worker, its tier and the request it is about, and how long before the decision it
    happened."""

    reason: MissKind
    explanation: str
    worker: str | None = None
    tier: str | None = None
    request: str | None = None
    ago_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMissReport:
    """The prompt of one job against the cache of the worker that computed it. Blocks are full ones; the first missing
    one is number `num_found`. `findings` begins with the most important reason."""

    prefill_worker: str
    block_size: int
    num_blocks: int
    num_expected: int
    num_expected_on_host: int
    num_found: int
    findings: tuple[MissReason, ...]


def explain(record: RequestTrace, records: RequestTraces, evictions: EvictionLog) -> CacheMissReport:
    """The job has a decision; its first token may be still to come."""
    choice = record.reading
    prefill_worker, block_size = choice.prefill_worker, choice.view.block_size
    read = record.timestamps.first_s is not None
    found = record.timestamps.num_cached_tokens // block_size
    return CacheMissReport(
        prefill_worker=prefill_worker.worker_id,
        block_size=block_size,
        num_blocks=record.num_prompt_tokens // block_size,
        num_expected=prefill_worker.num_cached_tokens // block_size,
        num_expected_on_host=-(-prefill_worker.num_host_tokens // block_size),
        num_found=found,
        findings=tuple(_findings(record, choice, found, records, evictions)) if read else (_not_computed(),),
    )


def _not_computed() -> MissReason:
    return MissReason(
        reason=MissKind.NOT_COMPUTED,
        explanation="the prompt has not been computed yet: no worker has reported its cache hits",
    )


def _findings(
    record: RequestTrace, choice: DecisionRecord, found: int, records: RequestTraces, evictions: EvictionLog
) -> Iterator[MissReason]:
    size, num_tokens = choice.view.block_size, record.num_prompt_tokens
    num_blocks = num_tokens // size
    if not num_blocks:
        explanation = f"the prompt has {num_tokens} tokens and a block {size}: only full blocks are cached"
        yield MissReason(reason=MissKind.SHORT, explanation=explanation)
        return
    if found >= (num_tokens - 1) // size:
        rest = num_tokens - found * size
        explanation = (
            f"all that can be cached was: the last {rest} tokens are computed always, for the first token of an answer"
        )
        yield MissReason(reason=MissKind.NOTHING_MISSING, explanation=explanation)
        return
    if not record.chain:
        yield MissReason(
            reason=MissKind.NOT_KEPT, explanation="the hashes of this prompt's blocks are not kept any more"
        )
        return
    block = record.chain[found]
    seen = [
        *_not_loaded(choice, found),
        *_behind(choice, found),
        *_elsewhere(choice, found),
        *_evicted(choice, block, found, evictions),
    ]
    past = _history(record, choice, found, records, evictions)
    yield from seen
    yield from (one for one in past if not seen or one.reason is not MissKind.NEVER_STORED)


def _not_loaded(choice: DecisionRecord, found: int) -> Iterator[MissReason]:
    prefill_worker, size = choice.prefill_worker, choice.view.block_size
    on_device = (prefill_worker.num_cached_tokens - prefill_worker.num_host_tokens) // size
    if on_device <= found < prefill_worker.num_cached_tokens // size:
        explanation = (
            f"{prefill_worker.worker_id} held block {found} in host memory alone and did not load it: "
            f"computing took less, or the block was evicted before its turn"
        )
        yield MissReason(
            reason=MissKind.NOT_LOADED,
            explanation=explanation,
            worker=prefill_worker.worker_id,
            tier=Tier.HOST.name.lower(),
        )


def _behind(choice: DecisionRecord, found: int) -> Iterator[MissReason]:
    expected = (
        choice.prefill_worker.num_cached_tokens - choice.prefill_worker.num_host_tokens
    ) // choice.view.block_size
    if expected > found:
        explanation = (
            f"the index had {choice.prefill_worker.worker_id} hold {expected} blocks, it held {found}: blocks were "
            f"expected of a request that had just been routed there, or events of evictions were still on their way"
        )
        yield MissReason(reason=MissKind.EVENTS_BEHIND, explanation=explanation, worker=choice.prefill_worker.worker_id)


def _elsewhere(choice: DecisionRecord, found: int) -> Iterator[MissReason]:
    prefill_worker, size = choice.prefill_worker, choice.view.block_size
    rivals = [
        one
        for one in choice.candidates
        if one.role is prefill_worker.role and one.worker_id != prefill_worker.worker_id
    ]
    others = [one for one in rivals if one.num_cached_tokens // size > found]
    if not others:
        return
    best = max(others, key=lambda one: one.num_cached_tokens)
    costs = {scored.worker_id: scored.total for scored in choice.decision.scores}
    had, got = costs.get(best.worker_id), costs.get(prefill_worker.worker_id)
    unit, scale = shown_unit(choice.decision.cost_unit)
    cost = ""
    if had is not None and got is not None:
        theirs, ours = (f"{cost_figure(scale * total)} {unit}".rstrip() for total in (had, got))
        cost = f": it would have cost {theirs}, against {ours}"
    explanation = f"{best.worker_id} held {best.num_cached_tokens // size} blocks and was not chosen{cost}"
    yield MissReason(reason=MissKind.ELSEWHERE, explanation=explanation, worker=best.worker_id)


def _evicted(choice: DecisionRecord, block: BlockHash, found: int, evictions: EvictionLog) -> Iterator[MissReason]:
    prefill_worker = choice.prefill_worker.worker_id
    if removals := evictions.removals(prefill_worker, block, before=choice.at_s):
        explanation = f"{prefill_worker} held block {found} and evicted it {_when(removals, choice.at_s)}"
        yield _eviction(explanation, removals, choice.at_s, prefill_worker)


def _when(removals: Sequence[tuple[float, Tier]], now: float) -> str:
    return ", ".join(f"from {PLACES[tier]} {now - at_s:.1f} s before" for at_s, tier in removals)


def _eviction(
    explanation: str, removals: Sequence[tuple[float, Tier]], now: float, worker: str, request: str | None = None
) -> MissReason:
    at_s, tier = removals[-1]
    return MissReason(
        reason=MissKind.EVICTED,
        explanation=explanation,
        worker=worker,
        tier=tier.name.lower(),
        request=request,
        ago_s=now - at_s,
    )


def _history(
    record: RequestTrace, choice: DecisionRecord, found: int, records: RequestTraces, evictions: EvictionLog
) -> Iterator[MissReason]:
    nearest, common = _nearest(record, records)
    if nearest is not None and common > found and nearest.choices:
        yield _had_before(nearest, choice, found, record.chain[found], evictions)
        return
    if nearest is None:
        if (salted := _other_salt(record, records)) is not None:
            explanation = (
                f"request {salted} began with the same tokens under another salt: tenants and salts share no cache"
            )
            yield MissReason(reason=MissKind.OTHER_SALT, explanation=explanation, request=salted)
        else:
            explanation = "no recent request began with the same block"
            yield MissReason(reason=MissKind.NEVER_STORED, explanation=explanation)
        return
    first = common * choice.view.block_size
    explanation = (
        f"no recent request had block {found}: the nearest, {nearest.job.group_id}, shares the first {common} blocks, "
        f"and the prompts part in the tokens {first} to {first + choice.view.block_size - 1}"
    )
    yield MissReason(reason=MissKind.NEVER_STORED, explanation=explanation, request=nearest.job.group_id)


def _had_before(
    nearest: RequestTrace, choice: DecisionRecord, found: int, block: BlockHash, evictions: EvictionLog
) -> MissReason:
    name, where, then = nearest.job.group_id, nearest.reading.prefill_worker.worker_id, nearest.received_s
    ago_s = choice.at_s - then
    if removals := evictions.removals(where, block, before=choice.at_s):
        gone = _when(removals, choice.at_s)
        explanation = f"request {name} had it computed on {where} {ago_s:.1f} s before, and {where} evicted it {gone}"
        return _eviction(explanation, removals, choice.at_s, where, name)
    if (at_s := evictions.cleared_s(where, since=then, before=choice.at_s)) is not None:
        gone_s = choice.at_s - at_s
        explanation = (
            f"request {name} had it computed on {where}, which has forgotten its cache or begun a new life since"
        )
        return MissReason(reason=MissKind.CLEARED, explanation=explanation, worker=where, request=name, ago_s=gone_s)
    if where != choice.prefill_worker.worker_id:
        here = choice.prefill_worker.worker_id
        explanation = f"request {name} had it computed on {where} {ago_s:.1f} s before, this one on {here}"
        return MissReason(
            reason=MissKind.COMPUTED_ELSEWHERE, explanation=explanation, worker=where, request=name, ago_s=ago_s
        )
    explanation = f"request {name} had it {ago_s:.1f} s before on the same worker, which has not reported it as cached"
    return MissReason(reason=MissKind.EVENTS_BEHIND, explanation=explanation, worker=where, request=name, ago_s=ago_s)


def _nearest(record: RequestTrace, records: RequestTraces) -> tuple[RequestTrace | None, int]:
    """The latest of several; (None, 0) if no earlier request begins alike."""
    nearest, longest = None, 0
    for one in records.before(record):
        common = num_common(one.chain, record.chain)
        if common > longest:
            nearest, longest = one, common
    return nearest, longest


def _other_salt(record: RequestTrace, records: RequestTraces) -> str | None:
    for one in records.before(record):
        if one.opening and one.opening == record.opening and one.job.cache_salt != record.job.cache_salt:
            return one.job.group_id
    return None


def num_common(a: Chain, b: Chain) -> int:
    """Hashes are chained: if one block is equal, all before it are."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = (middle - 1) * BLOCK_HASH_BYTES, middle * BLOCK_HASH_BYTES
        if a.packed[start:stop] == b.packed[start:stop]:
            low = middle
        else:
            high = middle - 1
    return low
