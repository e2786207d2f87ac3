"""Batches beside people: when one sequence more is admitted, who is suspended, and that no token is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from protos.values import FinishReason, SamplingParams, WorkerRole
from router.admission.idle import HOLD_S, PASS_S, IdleAdmission, IdleLimits, largest_job, to_shed
from router.jobs import BATCH_PRIORITY, Job, TokenDelta
from router.routing.candidate_columns import Candidate, CandidateTable, Line
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.fake_cluster import job as fake_job

LIMITS = IdleLimits(ttft_s=1.0, tpot_s=0.05, slowdown=1.1)
STEP = Line(fixed_s=0.01, each_s=0.0001)


def worker(role: WorkerRole = WorkerRole.COLOCATED, **numbers: Any) -> Candidate:
    fields: dict[str, Any] = {
        "worker_id": "w", "num_blocks": 100, "num_free_blocks": 100, "prefill_time": Line(each_s=0.0001),
        "step_time": STEP,
    }  # fmt: skip
    return Candidate(role=role, **(fields | numbers))


def table(*workers: Candidate) -> CandidateTable:
    return CandidateTable.of(workers)


@pytest.mark.parametrize(
    ("numbers", "own", "fits"),
    [
        ({}, 0, True),
        ({"num_requests": 10}, 0, True),  # 11 sequences: 11.1 ms, people alone have 11
        ({"num_requests": 21}, 10, True),  # 22 sequences: 12.2 ms, the 11 people alone have 11.1, so 12.21 are allowed
        ({"num_requests": 22}, 11, False),
        ({"num_requests": 390}, 390, True),  # no people: up to the objective
        ({"num_requests": 400}, 400, False),
        ({"num_requests": 5, "num_waiting": 1}, 0, False),
        ({"num_requests": 5, "num_free_blocks": 14}, 0, True),
        ({"num_requests": 5, "num_free_blocks": 13}, 0, False),
        ({"queued_prefill_tokens": 1000}, 0, True),
        ({"queued_prefill_tokens": 1001}, 0, False),
        ({"step_time": Line(fixed_s=1.0), "num_requests": 3}, 3, True),  # a slow worker without people
        ({"step_time": Line(fixed_s=1.0), "num_requests": 3}, 2, False),
        ({"step_time": Line(), "num_requests": 3}, 3, True),  # not measured yet
        ({"step_time": Line(), "num_requests": 4}, 4, False),
    ],
)
def test_one_sequence_more(numbers: dict[str, Any], own: int, fits: bool) -> None:
    assert (largest_job(table(worker(**numbers)), LIMITS, Counter(w=own)) >= 4) is fits


def test_a_pair_needs_room_on_both() -> None:
    decode = worker(WorkerRole.DECODE, worker_id="d")
    for queued, fits in ((0, True), (2000, False)):
        prefill = worker(WorkerRole.PREFILL, worker_id="p", queued_prefill_tokens=queued)
        assert (largest_job(table(prefill, decode), LIMITS, Counter()) >= 4) is fits
    assert largest_job(table(), LIMITS, Counter()) < 0


def test_so_many_leave_that_people_are_in_time() -> None:
    crowded = worker(num_requests=31)
    assert to_shed(table(crowded), LIMITS, Counter(w=20)) == Counter(w=9)  # 13.1 ms; 11.1 alone, 12.21 allowed
    assert to_shed(table(crowded), LIMITS, Counter(w=20), people_wait=True) == Counter(w=9)
    assert to_shed(table(worker(num_requests=8)), LIMITS, Counter(w=8), people_wait=True) == Counter(w=2)
    assert not +to_shed(table(worker(num_requests=8)), LIMITS, Counter(w=8))
    waiting = table(worker(num_requests=8, num_waiting=2))
    assert not +to_shed(waiting, LIMITS, Counter(w=8), num_unplaced=2)
    assert to_shed(waiting, LIMITS, Counter(w=8), num_unplaced=1) == Counter(w=2)


class _Fleet:
    """A fleet of one worker. People wait until its load is looked at again."""

    gateway_id, block_size, num_turned_away, num_people = "g", 16, 0, 0

    def candidates(self, matched: object, num_tokens: int) -> CandidateTable:
        return table(worker())

    async def wait(self, *, until: float) -> None:
        self.num_people = 0


async def test_a_suspended_job_goes_on_behind_its_tokens() -> None:
    fleet, jobs = _Fleet(), list[Job]()

    async def generate(job: Job) -> AsyncGenerator[TokenDelta, None]:
        jobs.append(job)
        for token_id in range(len(job.emitted), 6):
            yield TokenDelta(token_ids=(token_id,), finish_reason=FinishReason.LENGTH if token_id == 5 else None)

    idle = IdleAdmission(
        generate, fleet=fleet, limits=LIMITS, num_waiting=lambda: fleet.num_people, decided=lambda request_id: "w"
    )
    job = Job(request_id="j", group_id="j", prompt_ids=(1, 2), sampling=SamplingParams(seed=0, max_tokens=6))
    tokens: list[int] = []
    async with aclosing(idle(job)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            if len(tokens) == 2:
                fleet.num_people, idle._decided_s = 1, 0.0
    assert tokens == list(range(6))
    assert [job.emitted for job in jobs] == [(), (0, 1)]
    assert {job.priority for job in jobs} == {BATCH_PRIORITY}
    assert idle.num_suspended == 1
    async with aclosing(idle(job)) as deltas:  # its line is tried again
        async for _ in deltas:
            pass
    assert len({job.request_id for job in jobs}) == len(jobs), "a worker may still have the run before"


async def test_jobs_in_prefill_are_not_counted_as_people() -> None:
    running = 0

    class Steep(_Fleet):
        def candidates(self, matched: object, num_tokens: int) -> CandidateTable:
            return table(worker(num_requests=running, step_time=Line(fixed_s=0.01, each_s=0.002)))

        async def wait(self, *, until: float) -> None:
            await asyncio.Event().wait()

    async def generate(job: Job) -> AsyncGenerator[TokenDelta, None]:
        nonlocal running
        running += 1
        await asyncio.Event().wait()
        yield TokenDelta(token_ids=(1,))

    idle = IdleAdmission(generate, fleet=Steep(), limits=LIMITS, num_waiting=lambda: 0, decided=lambda request_id: "w")
    job = Job(request_id="j", group_id="j", prompt_ids=(1, 2), sampling=SamplingParams(seed=0, max_tokens=6))
    lines = [asyncio.create_task(anext(idle(job))) for _ in range(30)]
    for _ in range(200):
        await asyncio.sleep(0)
    assert running == 20, "steps of 50 ms"
    for line in lines:
        line.cancel()
    await asyncio.wait(lines)


class _SmallFleet(_Fleet):
    """Room for jobs of at most `most` blocks; each look at its load is an event for the test."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.looks = asyncio.Semaphore(0)

    def candidates(self, matched: object, num_tokens: int) -> CandidateTable:
        return table(worker(num_requests=1, num_free_blocks=10 + self.most))

    async def wait(self, *, until: float) -> None:
        await self.looks.acquire()


class _Line:
    """Jobs of one token, in the order in which they enter."""

    def __init__(self, fleet: _SmallFleet) -> None:
        self.entered: list[str] = []
        self.idle = IdleAdmission(
            self._generate, fleet=fleet, limits=LIMITS, num_waiting=lambda: 0, decided=lambda request_id: "w"
        )
        self._fleet = fleet

    async def _generate(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        self.entered.append(job.group_id)
        yield TokenDelta(token_ids=(1,), finish_reason=FinishReason.LENGTH)

    def join(self, name: str, num_blocks: int) -> asyncio.Task[None]:
        prompt = tuple(range(16 * (num_blocks - 1)))
        job = Job(request_id=name, group_id=name, prompt_ids=prompt, sampling=SamplingParams(seed=0, max_tokens=1))

        async def run() -> None:
            async for _ in self.idle(job):
                pass

        return asyncio.create_task(run())

    async def look(self) -> None:
        self._fleet.looks.release()
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_prompt_that_does_not_fit_stops_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("router.admission.idle.loop_time", lambda: now[0])
    fleet = _SmallFleet(most=10)
    line = _Line(fleet)
    large, small = line.join("large", 20), line.join("small", 5)
    await small
    assert line.entered == ["small"]
    now[0] = PASS_S  # smaller ones keep the room busy that the large one waits for: now it is kept
    held = line.join("held", 5)
    await line.look()
    assert line.entered == ["small"]
    now[0] = PASS_S + HOLD_S
    await line.look()
    await held
    now[0] += PASS_S
    last = line.join("last", 5)
    await line.look()
    fleet.most = 30
    await line.look()
    await asyncio.gather(large, last)
    assert line.entered == ["small", "held", "large", "last"]


async def test_after_an_error_of_the_fleet_the_line_goes_on() -> None:
    trouble = [ValueError("no load")]

    class FailingOnce(_SmallFleet):
        def candidates(self, matched: object, num_tokens: int) -> CandidateTable:
            if trouble:
                raise trouble.pop()
            return super().candidates(matched, num_tokens)

    line = _Line(FailingOnce(most=10))

    async def stubborn() -> None:
        try:
            await line.idle._wait_for_room(16)
        except ValueError:
            await line.idle._wait_for_room(16)

    async with asyncio.timeout(60):
        await asyncio.gather(stubborn(), stubborn())
        await line.join("third", 2)
    assert line.entered == ["third"]


async def test_one_that_leaves_the_line_holds_up_nobody() -> None:
    fleet = _SmallFleet(most=-1)
    line = _Line(fleet)
    first, second = line.join("first", 2), line.join("second", 2)
    await line.look()
    first.cancel()
    await asyncio.wait([first])
    fleet.most = 10
    await line.look()
    await second
    assert line.entered == ["second"]
    assert len(asyncio.all_tasks()) == 1, "nothing runs without a line"


async def test_a_job_goes_on_elsewhere_behind_its_tokens(cluster: Cluster) -> None:
    """The dispatcher gives workers what a suspended job had."""
    whole = [delta async for delta in cluster.generate(fake_job(max_tokens=6))]
    tokens = [token_id for delta in whole for token_id in delta.token_ids]
    rest = [delta async for delta in cluster.generate(replace(fake_job(max_tokens=6), emitted=tuple(tokens[:4])))]
    assert [token_id for delta in rest for token_id in delta.token_ids] == tokens[4:]
