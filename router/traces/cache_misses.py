"""Explains why a prompt was not found in a cache: the first missing block, and why it is missing.

Losses ◀── the feed: what workers removed, and when          Records: what earlier prompts had in common with this one
   └──────────────┬────────────────────────────────────────────────┘
               explain(record) ─▶ Miss: a reason, and a sentence for people
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from protos.chain import Chain
from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockRemoved, Cleared, KVEvent, Tier
from router.routing.decision import cost_figure, shown_unit
from router.traces.request_trace import DecisionRecord, RequestTrace, RequestTraces

MAX_LOSSES = 2**18  # blocks, of all workers together
PLACES = {Tier.DEVICE: "the device", Tier.HOST: "host memory"}
_NONE: Mapping[BlockHash, float] = {}


class EvictionLog:
    """The last `capacity` blocks that workers removed from a tier, with times. Workers that have removed none for
    longest are forgotten first."""

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
        times = [(self._lost.get((worker_id, tier), _NONE).get(block), tier) for tier in Tier]
        return sorted((at_s, tier) for at_s, tier in times if at_s is not None and at_s <= before)

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


@dataclass(frozen=True, slots=True)
class MissReason:
    """One reason, with its worker, tier and request, and the seconds from the event to the decision."""

    reason: MissKind
    explanation: str
    _: KW_ONLY
    worker: str | None = None
    tier: str | None = None
    request: str | None = None
    ago_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMissReport:
    """One job's prompt compared with the cache of its prefill worker, in full blocks; block `num_found` is the first
    missing one. `findings` begins with the most important reason."""

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
    num_found = record.timestamps.num_cached_tokens // block_size
    if record.timestamps.first_s is not None:
        findings = tuple(_findings(record, choice, num_found, records, evictions))
    else:
        text = "the prompt has not been computed yet: no worker has reported its cache hits"
        findings = (MissReason(MissKind.NOT_COMPUTED, text),)
    return CacheMissReport(
        prefill_worker=prefill_worker.worker_id,
        block_size=block_size,
        num_blocks=record.num_prompt_tokens // block_size,
        num_expected=prefill_worker.num_cached_tokens // block_size,
        num_expected_on_host=-(-prefill_worker.num_host_tokens // block_size),
        num_found=num_found,
        findings=findings,
    )


def _findings(
    record: RequestTrace, choice: DecisionRecord, num_found: int, records: RequestTraces, evictions: EvictionLog
) -> Iterator[MissReason]:
    size, num_tokens = choice.view.block_size, record.num_prompt_tokens
    if num_tokens < size:
        text = f"the prompt has {num_tokens} tokens and a block {size}: only full blocks are cached"
        yield MissReason(MissKind.SHORT, text)
    elif num_found >= (num_tokens - 1) // size:
        rest = num_tokens - num_found * size
        text = f"all that can be cached was: the last {rest} tokens are computed always, for an answer's first token"
        yield MissReason(MissKind.NOTHING_MISSING, text)
    elif not record.chain:
        yield MissReason(MissKind.NOT_KEPT, "the hashes of this prompt's blocks are not kept any more")
    else:
        seen = [
            *_on_worker(choice, num_found),
            *_elsewhere(choice, num_found),
            *_evicted(choice, record.chain[num_found], num_found, evictions),
        ]
        yield from seen
        past = _history(record, choice, num_found, records, evictions)
        yield from (reason for reason in past if not seen or reason.reason is not MissKind.NEVER_STORED)


def _on_worker(choice: DecisionRecord, num_found: int) -> Iterator[MissReason]:
    """Blocks that the index expected on the prefill worker, in host memory or on the device."""
    worker, size = choice.prefill_worker, choice.view.block_size
    name, on_device = worker.worker_id, (worker.num_cached_tokens - worker.num_host_tokens) // size
    if on_device <= num_found < worker.num_cached_tokens // size:
        text = (
            f"{name} held block {num_found} in host memory alone and did not load it: computing took less, or the "
            "block was evicted before its turn"
        )
        yield MissReason(MissKind.NOT_LOADED, text, worker=name, tier=Tier.HOST.name.lower())
    if on_device > num_found:
        text = (
            f"the index had {name} hold {on_device} blocks, it held {num_found}: blocks were expected of a request "
            "that had just been routed there, or events of evictions were still on their way"
        )
        yield MissReason(MissKind.EVENTS_BEHIND, text, worker=name)


def _elsewhere(choice: DecisionRecord, num_found: int) -> Iterator[MissReason]:
    mine, size = choice.prefill_worker, choice.view.block_size
    rivals = [
        rival
        for rival in choice.candidates
        if rival.role is mine.role and rival.worker_id != mine.worker_id and rival.num_cached_tokens // size > num_found
    ]
    if not rivals:
        return
    best = max(rivals, key=lambda rival: rival.num_cached_tokens)
    costs = {scored.worker_id: scored.total for scored in choice.decision.scores}
    unit, scale = shown_unit(choice.decision.cost_unit)
    cost = ""
    if {best.worker_id, mine.worker_id} <= costs.keys():
        theirs, ours = (f"{cost_figure(scale * costs[worker.worker_id])} {unit}".rstrip() for worker in (best, mine))
        cost = f": it would have cost {theirs}, against {ours}"
    text = f"{best.worker_id} held {best.num_cached_tokens // size} blocks and was not chosen{cost}"
    yield MissReason(MissKind.ELSEWHERE, text, worker=best.worker_id)


def _evicted(choice: DecisionRecord, block: BlockHash, num_found: int, evictions: EvictionLog) -> Iterator[MissReason]:
    worker = choice.prefill_worker.worker_id
    if removals := evictions.removals(worker, block, before=choice.at_s):
        text = f"{worker} held block {num_found} and evicted it {_when(removals, choice.at_s)}"
        yield _eviction(text, removals, choice.at_s, worker)


def _when(removals: Sequence[tuple[float, Tier]], now: float) -> str:
    return ", ".join(f"from {PLACES[tier]} {now - at_s:.1f} s before" for at_s, tier in removals)


def _eviction(
    text: str, removals: Sequence[tuple[float, Tier]], now: float, worker: str, request: str | None = None
) -> MissReason:
    at_s, tier = removals[-1]
    return MissReason(MissKind.EVICTED, text, worker=worker, tier=tier.name.lower(), request=request, ago_s=now - at_s)


def _history(
    record: RequestTrace, choice: DecisionRecord, num_found: int, records: RequestTraces, evictions: EvictionLog
) -> Iterator[MissReason]:
    nearest, common = _nearest(record, records)
    if nearest is None:
        if (salted := _other_salt(record, records)) is not None:
            text = f"request {salted} began with the same tokens under another salt: tenants and salts share no cache"
            yield MissReason(MissKind.OTHER_SALT, text, request=salted)
        else:
            yield MissReason(MissKind.NEVER_STORED, "no recent request began with the same block")
    elif common > num_found and nearest.choices:
        yield _had_before(nearest, choice, record.chain[num_found], evictions)
    else:
        first, name = common * choice.view.block_size, nearest.job.group_id
        text = (
            f"no recent request had block {num_found}: the nearest, {name}, shares the first {common} blocks, and the "
            f"prompts part in the tokens {first} to {first + choice.view.block_size - 1}"
        )
        yield MissReason(MissKind.NEVER_STORED, text, request=name)


def _had_before(nearest: RequestTrace, choice: DecisionRecord, block: BlockHash, evictions: EvictionLog) -> MissReason:
    """An earlier request had the block computed on a worker."""
    name, where, then = nearest.job.group_id, nearest.reading.prefill_worker.worker_id, nearest.received_s
    ago_s, here = choice.at_s - then, choice.prefill_worker.worker_id
    if removals := evictions.removals(where, block, before=choice.at_s):
        gone = _when(removals, choice.at_s)
        text = f"request {name} had it computed on {where} {ago_s:.1f} s before, and {where} evicted it {gone}"
        return _eviction(text, removals, choice.at_s, where, name)
    if (at_s := evictions.cleared_s(where, since=then, before=choice.at_s)) is not None:
        kind, ago_s = MissKind.CLEARED, choice.at_s - at_s
        text = f"request {name} had it computed on {where}, which has forgotten its cache or begun a new life since"
    elif where != here:
        kind = MissKind.COMPUTED_ELSEWHERE
        text = f"request {name} had it computed on {where} {ago_s:.1f} s before, this one on {here}"
    else:
        kind = MissKind.EVENTS_BEHIND
        text = f"request {name} had it {ago_s:.1f} s before on the same worker, which has not reported it as cached"
    return MissReason(kind, text, worker=where, request=name, ago_s=ago_s)


def _nearest(record: RequestTrace, records: RequestTraces) -> tuple[RequestTrace | None, int]:
    """The latest of several; (None, 0) if no earlier request begins alike."""
    nearest, longest = None, 0
    for earlier in records.before(record):
        common = num_common(earlier.chain, record.chain)
        if common > longest:
            nearest, longest = earlier, common
    return nearest, longest


def _other_salt(record: RequestTrace, records: RequestTraces) -> str | None:
    for earlier in records.before(record):
        if earlier.opening and earlier.opening == record.opening and earlier.job.cache_salt != record.job.cache_salt:
            return earlier.job.group_id
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
