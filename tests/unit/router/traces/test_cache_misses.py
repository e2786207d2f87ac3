"""Why a prompt was not in a cache: each reason, from the records and removals that lead to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

from kvtransfer.hashing import chain_hashes
from protos.values import BlockRemoved, Cleared, SamplingParams, Tier, WorkerRole
from router.jobs import Job
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.decision import Decision, RequestView, Score, cost_figure
from router.routing.request_seconds import LatencyEstimate
from router.traces.cache_misses import EvictionLog, MissKind, MissReason, explain, num_common
from router.traces.request_trace import DecisionRecord, RequestTrace, RequestTraces

SIZE = 4
PROMPT = tuple(range(18))  # four full blocks, and two tokens


class Past:
    """Requests that were read, one after the other, a second apart."""

    def __init__(self) -> None:
        self.records = RequestTraces()
        self.evictions = EvictionLog()
        self.num = 0

    def read(
        self, prompt: tuple[int, ...] = PROMPT, *, by: str = "p0", found: int = 0, salt: bytes = b"", **cached: int
    ) -> RequestTrace:
        """`found` blocks were in the prefill worker's cache; the index expected `cached` on each."""
        self.num += 1
        name = f"r{self.num}"
        job = Job(request_id=f"{name}-0", group_id=name, prompt_ids=prompt, sampling=SamplingParams(), cache_salt=salt)
        self.records.open([job])
        record = self.records.of(job)
        record.received_s = float(self.num)
        self.records.keep_chain(record, chain_hashes(prompt, SIZE, salt=salt), SIZE)
        workers = {"p0": 0, "p1": 0} | cached
        candidates = CandidateTable.of(
            [
                Candidate(worker_id=value, role=WorkerRole.COLOCATED, num_cached_tokens=min(n * SIZE, len(prompt) - 1))
                for value, n in workers.items()
            ]
        )
        decision = Decision(
            policy="slo",
            cost_unit="s",
            prefill=None,
            decode=by,
            scores=tuple(Score(worker_id=worker, role=WorkerRole.COLOCATED, total=1.0) for worker in workers),
        )
        view = RequestView(request_id=job.request_id, num_tokens=len(prompt), block_size=SIZE)
        expected = LatencyEstimate(ttft_s=0.1, tpot_s=0.1, transfer_s=0.0, num_cached_tokens=0)
        choice = DecisionRecord(
            at_s=float(self.num), view=view, candidates=candidates, num_candidates=len(candidates), decision=decision,
            prefill_worker=candidates.candidate(by), decode_worker=candidates.candidate(by), estimate=expected,
        )  # fmt: skip
        record.chose(choice)
        record.took(1, found * SIZE, float(self.num))
        return record

    def decide_again(self, record: RequestTrace, *, by: str, at_s: float) -> None:
        choice = record.choices[-1]
        worker, decision = choice.candidates.candidate(by), replace(choice.decision, decode=by)
        record.chose(replace(choice, at_s=at_s, decision=decision, prefill_worker=worker, decode_worker=worker))

    def why(self, record: RequestTrace) -> MissReason:
        return explain(record, self.records, self.evictions).findings[0]


@pytest.fixture
async def past() -> Past:
    return Past()


async def test_a_prompt_that_nobody_has_sent_was_never_stored(past: Past) -> None:
    past.read((99,) * 18)
    assert past.why(past.read()).reason is MissKind.NEVER_STORED


async def test_a_block_that_was_expected_is_not_never_stored(past: Past) -> None:
    report = explain(past.read(p0=1), past.records, past.evictions)
    assert (report.num_expected, report.num_found) == (1, 0)
    assert [finding.reason for finding in report.findings] == [MissKind.EVENTS_BEHIND]


async def test_where_prompts_part_is_told_with_the_nearest_request(past: Past) -> None:
    past.read()
    past.read((*PROMPT[:4], *[7] * 14))
    miss = explain(past.read((*PROMPT[:9], *[8] * 9), found=2, p0=2), past.records, past.evictions)
    assert (miss.num_blocks, miss.num_found, miss.num_expected) == (4, 2, 2)
    [finding] = miss.findings
    assert (finding.reason, finding.request) == (MissKind.NEVER_STORED, "r1")
    assert "shares the first 2 blocks" in finding.explanation
    assert "tokens 8 to 11" in finding.explanation


async def test_an_evicted_block_is_told_with_its_worker_and_time(past: Past) -> None:
    first = past.read()
    past.evictions.observe("p0", (BlockRemoved(hashes=(first.chain[2],)),), 1.5)
    finding = past.why(past.read(found=2, p0=2))
    assert (finding.reason, finding.worker, finding.ago_s) == (MissKind.EVICTED, "p0", 0.5)
    assert finding.tier == "device"


async def test_a_block_that_left_both_tiers_is_told_with_each(past: Past) -> None:
    first = past.read()
    past.evictions.observe("p0", (BlockRemoved(hashes=(first.chain[2],)),), 1.25)
    past.evictions.observe("p0", (BlockRemoved(hashes=(first.chain[2],), tier=Tier.HOST),), 1.5)
    finding = past.why(past.read(found=2, p0=2))
    assert (finding.reason, finding.tier, finding.ago_s) == (MissKind.EVICTED, "host", 0.5)
    assert finding.explanation.endswith("evicted it from the device 0.8 s before, from host memory 0.5 s before")


async def test_a_host_block_that_was_computed_anyway_is_reported(past: Past) -> None:
    past.read()
    record = past.read(found=2, p0=4)
    choice = record.choices[-1]
    hosting = replace(choice.prefill_worker, num_host_tokens=2 * SIZE - 1)
    candidates = CandidateTable.of([hosting, choice.candidates[1]])
    record.choices[-1] = replace(choice, candidates=candidates, prefill_worker=hosting)
    miss = explain(record, past.records, past.evictions)
    assert (miss.num_expected, miss.num_expected_on_host) == (4, 2)
    assert (miss.findings[0].reason, miss.findings[0].tier) == (MissKind.NOT_LOADED, "host")


async def test_a_later_eviction_is_no_reason(past: Past) -> None:
    first = past.read()
    second = past.read(found=2, p0=2)
    past.evictions.observe("p0", (BlockRemoved(hashes=(first.chain[2],)),), 9.0)
    assert past.why(second).reason is MissKind.EVENTS_BEHIND


async def test_a_worker_that_forgot_everything_is_told(past: Past) -> None:
    past.read(by="p1")
    past.evictions.observe("p1", (Cleared(),), 1.5)
    finding = past.why(past.read())
    assert (finding.reason, finding.worker, finding.request) == (MissKind.CLEARED, "p1", "r1")


async def test_a_better_candidate_is_reported_with_its_cost(past: Past) -> None:
    past.read(by="p1")
    finding = past.why(past.read(p1=4))
    assert (finding.reason, finding.worker) == (MissKind.ELSEWHERE, "p1")
    assert "held 4 blocks and was not chosen: it would have cost 1,000 ms, against 1,000 ms" in finding.explanation


async def test_an_index_ahead_of_its_worker_is_told(past: Past) -> None:
    past.read()
    assert past.why(past.read(found=1, p0=4)).reason is MissKind.EVENTS_BEHIND


async def test_the_prefill_worker_explains_the_miss(past: Past) -> None:
    record = past.read(by="p0")
    record.timestamps.first_s = 3.0
    past.decide_again(record, by="p1", at_s=2.0)  # p0 failed before it had read
    past.decide_again(record, by="p0", at_s=4.0)  # and p1 after its first tokens
    assert explain(record, past.records, past.evictions).prefill_worker == "p1"


async def test_another_salt_is_told(past: Past) -> None:
    past.read(salt=b"one tenant")
    finding = past.why(past.read(salt=b"another"))
    assert (finding.reason, finding.request) == (MissKind.OTHER_SALT, "r1")


@pytest.mark.parametrize(
    ("prompt", "found", "reason"),
    [
        ((1, 2, 3), 0, MissKind.SHORT),
        (PROMPT, 4, MissKind.NOTHING_MISSING),
        (PROMPT[:16], 3, MissKind.NOTHING_MISSING),
    ],
    ids=["shorter than a block", "a rest", "the last token is always computed"],
)
async def test_uncacheable_blocks_are_no_miss(
    past: Past, prompt: tuple[int, ...], found: int, reason: MissKind
) -> None:
    assert past.why(past.read(prompt, found=found)).reason is reason


async def test_the_memory_of_removed_blocks_is_bounded() -> None:
    evictions = EvictionLog(capacity=4)
    hashes = chain_hashes(tuple(range(60)), 4)
    for block in hashes:
        evictions.observe("a", (BlockRemoved(hashes=(block,)),), 1.0)
    removed = [block for block in hashes if evictions.removals("a", block, before=2.0)]
    assert removed == list(hashes)[-4:]
    evictions.observe("b", (BlockRemoved(hashes=tuple(hashes[:3])),), 1.5)
    assert [evictions.removals("b", block, before=2.0) for block in hashes[:3]] == [[(1.5, Tier.DEVICE)]] * 3
    assert [bool(evictions.removals("a", block, before=2.0)) for block in hashes[-4:]] == [False] * 3 + [True]


async def test_hashes_are_bounded_and_their_absence_is_reported(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.traces.request_trace.MAX_CHAIN_BYTES", 100)
    first, second = past.read(), past.read()
    assert (len(first.chain), len(second.chain)) == (0, 4)
    assert past.why(first).reason is MissKind.NOT_KEPT


def test_the_common_beginning_of_two_chains() -> None:
    chain = chain_hashes(PROMPT, SIZE)
    for same in range(5):
        other = chain_hashes((*PROMPT[: same * SIZE], *[77] * (18 - same * SIZE)), SIZE)
        assert num_common(chain, other) == same


async def test_records_are_found_by_every_name_until_they_are_too_old() -> None:
    records = RequestTraces(capacity=2)

    def job(name: str, **more: Any) -> Job:
        return Job(request_id=f"cmpl-{name}-0", group_id=name, prompt_ids=(1,), sampling=SamplingParams(), **more)

    for name in "abc":
        records.open([job(name)])
    await asyncio.sleep(0)
    assert not records.find("a")
    [record] = records.find("b")
    assert records.find("cmpl-b") == records.find("cmpl-b-0") == (record,)
    assert [entry.job.group_id for entry in records.recent(9)] == ["c", "b"]


class Name(str):
    """A string that can be referred to weakly."""

    __slots__ = ("__weakref__",)


async def test_an_old_request_leaves_nothing() -> None:
    records = RequestTraces(capacity=1)
    name = Name("first-0")
    gone = ref(name)
    for request_id in (name, "second-0"):
        job = Job(request_id=request_id, group_id="", prompt_ids=(1, 2), sampling=SamplingParams())
        records.open([job])
        records.keep_chain(records.of(job), chain_hashes(job.prompt_ids, SIZE), SIZE)
    del name, request_id, job
    assert gone() is None


async def test_a_prompt_is_not_kept_beyond_the_end_of_its_request() -> None:
    records = RequestTraces()
    job = Job(request_id="a-0", group_id="a", prompt_ids=PROMPT, sampling=SamplingParams())
    records.open([job])
    records.close([job], None)
    [record] = records.find("a")
    assert (record.job.prompt_ids, record.num_prompt_tokens, record.outcome) == ((), len(PROMPT), "stop")


@pytest.mark.parametrize(
    ("cost", "figure"),
    [
        (0.12345, "0.123"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.7, "1,000"),
        (12345.6, "12,346"),
        (0.0, "0"),
        (0.00005, "0"),
        (-0.0004, "0"),
        (0.0005, "0.0005"),
        (-0.5, "-0.5"),
        (-1234.0, "-1,234"),
    ],
)
def test_a_cost_has_three_digits_and_no_exponent(cost: float, figure: str) -> None:
    assert cost_figure(cost) == figure
