"""The gate before the fleet: order, room, early refusal, and nobody left in line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.errors import InvalidRequest, Overloaded
from protos.values import BlockHash, BlockStored, FinishReason, SamplingParams, WorkerRole
from router.admission.admission import Admission
from router.admission.fair_queue import Entry, FairQueue
from router.admission.retry_queue import Returning
from router.admission.time_and_room import least_ttft_s
from router.dispatch.job_state import JobState
from router.jobs import Job, TokenDelta
from router.prefix.index import Match
from router.prefix.memory_index import MemoryPrefixIndex
from router.routing.candidate_columns import Candidate, CandidateTable, Line
from tests.unit.cluster.virtual_time import run_virtually
from tests.unit.router.fake_cluster import router_config

SPEED = 1000.0  # prompt tokens a second


class Pool:
    """One colocated worker whose load the test sets, and the dispatcher before it, which counts what it was given."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.gateway_id, self.block_size = "g", 16
        self.candidate = Candidate(
            worker_id="w0", role=WorkerRole.COLOCATED, num_free_blocks=1000, num_blocks=1000, prefill_tokens_per_s=SPEED
        )
        self.given: list[str] = []
        self.num_turned_away = 0
        self.overhead = 0.0
        self._turn = asyncio.Event()
        self._open: dict[str, asyncio.Event] = {}

    def match(self, hashes: Callable[[int], Sequence[BlockHash]], *, now: float) -> Match:
        return self.index.match(hashes(self.block_size), now=now)

    def candidates(self, matched: Match, num_tokens: int) -> CandidateTable:
        num_cached = min(matched.blocks.get("w0", 0) * 16, num_tokens - 1)
        return CandidateTable.of([replace(self.candidate, num_cached_tokens=num_cached)])

    def loads(self) -> CandidateTable:
        return CandidateTable.of([self.candidate])

    def overhead_s(self) -> float:
        return self.overhead

    async def wait(self, *, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._turn.wait()

    def show(self, **load: Any) -> None:
        self.candidate = replace(self.candidate, **load)
        self._turn.set()
        self._turn = asyncio.Event()

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        self.given.append(job.request_id)
        self.candidate = replace(
            self.candidate,
            num_waiting=self.candidate.num_waiting + 1,
            num_requests=self.candidate.num_requests + 1,
            queued_prefill_tokens=self.candidate.queued_prefill_tokens + len(job.prompt_ids),
        )
        await self._open.setdefault(job.request_id, asyncio.Event()).wait()
        yield TokenDelta(token_ids=(1,), finish_reason=FinishReason.LENGTH)

    def finish(self, request_id: str) -> None:
        self._open.setdefault(request_id, asyncio.Event()).set()


def job(name: str, *, num_tokens: int = 500, **others: Any) -> Job:
    return Job(request_id=name, group_id=name, prompt_ids=tuple(range(num_tokens)), sampling=SamplingParams(), **others)


def admission(pool: Pool, **settings: Any) -> Admission:
    config = router_config(Path(), "toy", **settings)
    return Admission(pool, fleet=pool, config=config)


async def run(gate: Admission, one: Job) -> list[TokenDelta]:
    async with aclosing(gate(one)) as deltas:
        return [delta async for delta in deltas]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_idle_fleet_is_given_a_job_at_once() -> None:
    pool = Pool()
    pool.finish("a")
    [delta] = await run(admission(pool), job("a"))
    assert delta.token_ids == (1,)
    assert pool.given == ["a"]


async def test_a_cache_hit_is_subtracted_once() -> None:
    pool = Pool()

    async def reading(job: Job) -> AsyncGenerator[TokenDelta, None]:
        for read in range(100, 501, 100):
            yield TokenDelta(num_prompt_computed=read, num_cached_tokens=400)
        yield TokenDelta(token_ids=(1,), num_cached_tokens=400)
        yield TokenDelta(token_ids=(2,), finish_reason=FinishReason.LENGTH)

    line = FairQueue()
    line.charge("", num_input=100, num_output=2)
    expected = line.served("")
    gate = Admission(reading, fleet=pool, config=router_config(Path(), "toy"))
    await run(gate, job("a"))
    assert gate.served("") == expected


async def test_a_worker_is_kept_supplied_and_not_flooded() -> None:
    pool = Pool()
    gate = admission(pool, max_backlog_s=1.0)
    running = [asyncio.create_task(run(gate, job(f"r{n}"))) for n in range(6)]
    await settle()
    assert pool.given == ["r0", "r1", "r2"]  # a second's worth is two of them; a third was let in while that was open
    assert gate.num_waiting == 3
    pool.show(queued_prefill_tokens=900, num_waiting=1)  # its step read some
    await settle()
    assert pool.given == ["r0", "r1", "r2", "r3"]
    pool.show(queued_prefill_tokens=0, num_waiting=0)
    await settle()
    assert pool.given == [f"r{n}" for n in range(6)]
    assert not gate.num_waiting
    for n in range(6):
        pool.finish(f"r{n}")
    await asyncio.gather(*running)


async def test_when_there_is_room_again_the_line_moves_in_fair_order() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(num_waiting=64)
    running = [asyncio.create_task(run(gate, job(f"flood{n}", tenant="flood"))) for n in range(4)]
    running.append(asyncio.create_task(run(gate, job("quiet", tenant="quiet"))))
    running.append(asyncio.create_task(run(gate, job("urgent", tenant="flood", priority=1))))
    await settle()
    assert not pool.given
    for _ in range(6):
        pool.show(num_waiting=0, queued_prefill_tokens=0)
        await settle()
    assert pool.given[0] == "urgent"
    assert pool.given.index("quiet") < pool.given.index("flood1")
    for name in pool.given:
        pool.finish(name)
    await asyncio.gather(*running)


async def test_an_unreachable_deadline_is_refused_with_a_retry_time() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(queued_prefill_tokens=5000, num_waiting=5)
    with pytest.raises(Overloaded, match=r"about 5\.5 s") as refused:
        await run(gate, job("late", max_ttft_s=2.0))
    assert refused.value.retry_after_s == pytest.approx(3.5)
    assert refused.value.param == "max_ttft_ms"
    assert not pool.given
    assert not gate.num_waiting
    assert gate.refused.deadline_unreachable == 1


def test_a_refused_job_returns_after_those_refused_before_it() -> None:
    """Otherwise all would return at the same moment."""
    returning, numbers = Returning(), count()

    def told(*, now: float = 0.0, tenant: str = "", priority: int = 0) -> float:
        entry = Entry(number=next(numbers), tenant=tenant, priority=priority, num_tokens=500, deadline_s=now + 2.0)
        return returning.after_s(entry, speed=SPEED, now=now)

    assert [told() for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert told(priority=1) == 0.0, "it goes before all of them"
    assert told(tenant="quiet") == 1.0, "the urgent one, and one of another tenant's"
    assert told(now=1.0) == 2.0, "two of the six have had their time"
    for step in range(8):
        returning.read(125, now=1.0 + step / 2)
    assert told(now=5.0) > 4.0, "prompts are read at a quarter of that speed: a writer is what is missing"


async def test_an_impossible_deadline_has_no_retry_time() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(prefill_time=Line(each_s=1.0))  # first tokens have been very late lately, for whatever reason
    with pytest.raises(InvalidRequest, match=r"2000 tokens\) would come after about 2000 ms") as refused:
        await run(gate, job("long", num_tokens=2000, max_ttft_s=1.9))
    assert refused.value.param == "max_ttft_ms"
    assert refused.value.retry_after_s is None
    assert gate.refused.deadline_impossible == 1
    pool.finish("short")
    assert await run(gate, job("short", num_tokens=1000, max_ttft_s=1.9)), (
        "it is idle: how else would it be seen to be fast"
    )


async def test_a_deadline_below_the_overhead_cannot_be_met() -> None:
    """However fast prompts are read: a step, the calls and the gateway itself take their time."""
    pool = Pool()
    gate = admission(pool)
    pool.show(prefill_tokens_per_s=1e7, prefill_time=Line(fixed_s=0.003))
    pool.overhead = 0.0016
    with pytest.raises(
        InvalidRequest, match=r"max_ttft_ms is 1: .*30 tokens\) would come after about 2 ms; allow more"
    ):
        await run(gate, job("tiny", num_tokens=30, max_ttft_s=0.001))
    assert not pool.given
    pool.finish("a")
    assert await run(gate, job("a", num_tokens=30, max_ttft_s=0.002))
    pool.show(prefill_tokens_per_s=0.0, num_requests=0, num_waiting=0, queued_prefill_tokens=0)  # all were as short
    with pytest.raises(InvalidRequest, match="about 2 ms"):
        await run(gate, job("tiny", num_tokens=30, max_ttft_s=0.001))


def test_an_unmeasured_worker_refuses_nothing_it_could_serve() -> None:
    candidate = replace(Pool().candidate, prefill_tokens_per_s=1e4, prefill_time=Line(fixed_s=0.018, each_s=1e-4))
    newcomer = replace(candidate, worker_id="w1", prefill_tokens_per_s=0.0)

    def least_s(*readers: Candidate, overhead_s: float = 3.0, num_tokens: int = 10) -> float | None:
        return least_ttft_s(CandidateTable.of(readers), num_tokens, overhead_s=overhead_s)

    assert least_s(candidate) == least_s(candidate, newcomer) == pytest.approx(0.019)
    assert least_s(candidate, newcomer, num_tokens=50_000) == 3.0, "it may read at once"
    assert least_s(newcomer) == 3.0


@pytest.mark.parametrize(("speed", "num_given"), [(SPEED, 0), (1e7, 20)])
def test_with_nobody_else_here_nobody_is_told_to_come_again(speed: float, num_given: int) -> None:
    """A bound that was missed a moment ago is refused for good or tried again: there is nothing to wait for."""

    async def scenario() -> None:
        pool = Pool()
        gate = admission(pool)
        for number in range(20):
            pool.show(prefill_tokens_per_s=speed, num_waiting=0, num_requests=0, queued_prefill_tokens=0)
            asyncio.get_running_loop().call_later(0.05, pool.finish, f"a{number}")
            with suppress(InvalidRequest):
                await run(gate, job(f"a{number}", num_tokens=10, max_ttft_s=0.001))
        assert (len(pool.given), gate.refused.deadline_impossible) == (num_given, 20 - num_given)

    run_virtually(scenario())


async def test_a_prompt_is_hashed_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(*args: Any, **more: Any) -> Chain:
        hashed.append(1)
        return chain_hashes(*args, **more)

    monkeypatch.setattr("router.jobs.chain_hashes", counted)
    pool = Pool()
    pool.finish("a")
    queued = job("a", num_tokens=64, max_ttft_s=5.0)
    await run(admission(pool), queued)
    assert len(hashed) == 1
    own = queued.hashes(16)
    assert JobState(queued, now=0.0).hashes(16) is own
    assert len(hashed) == 2
    assert replace(queued, cache_salt=b"other").hashes(16) != own


def test_an_idle_cluster_does_not_refuse_for_past_delays() -> None:
    async def scenario() -> None:
        pool = Pool()
        gate = admission(pool)
        for number in range(10):
            pool.show(num_waiting=1, queued_prefill_tokens=300)  # half a second with the prompt's own
            late = asyncio.ensure_future(run(gate, job(f"late-{number}", num_tokens=200, max_ttft_s=1000.0)))
            await asyncio.sleep(2.5)
            pool.finish(f"late-{number}")
            await late
        pool.show(num_waiting=1, queued_prefill_tokens=300)
        with pytest.raises(Overloaded):
            await run(gate, job("behind as much", num_tokens=200, max_ttft_s=0.8))
        pool.show(num_waiting=0, queued_prefill_tokens=0)
        pool.finish("alone")
        assert await run(gate, job("alone", num_tokens=50, max_ttft_s=0.8))

    run_virtually(scenario())


async def test_a_cached_prompt_is_not_taken_for_slow() -> None:
    pool = Pool()
    asked = job("cached", num_tokens=4000, max_ttft_s=2.0)
    pool.index.apply("w0", [BlockStored(hashes=tuple(chain_hashes(asked.prompt_ids, 16)))])
    pool.finish("cached")
    assert await run(admission(pool), asked)


async def test_who_waited_until_its_time_had_passed_is_told_so() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(num_waiting=64)
    with pytest.raises(Overloaded, match="max_ttft_ms"):
        await run(gate, job("patient", num_tokens=1, max_ttft_s=0.05))
    assert not pool.given
    assert not gate.num_waiting
    assert gate.refused.queue_timeout == 1


async def test_a_full_line_refuses_the_one_who_would_go_last() -> None:
    pool = Pool()
    gate = admission(pool, max_queued=3)
    pool.show(num_waiting=64)
    running = {f"flood{n}": asyncio.create_task(run(gate, job(f"flood{n}", tenant="flood"))) for n in range(3)}
    await settle()
    with pytest.raises(Overloaded, match="3 requests wait"):
        await run(gate, job("flood3", tenant="flood"))
    running["quiet"] = asyncio.create_task(run(gate, job("quiet", tenant="quiet")))
    await settle()
    with pytest.raises(Overloaded) as refused:
        await running.pop("flood2")
    assert refused.value.retry_after_s == pytest.approx(1.5)  # what is in line takes that long to read
    assert gate.num_waiting == 3
    assert gate.refused.queue_full == 2
    for _ in range(4):
        pool.show(num_waiting=0, queued_prefill_tokens=0)
        await settle()
    for name in running:
        pool.finish(name)
    await asyncio.gather(*running.values())


async def test_a_cancelled_job_leaves_the_queue() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(num_waiting=64)
    waiting = asyncio.create_task(run(gate, job("gone")))
    await settle()
    assert gate.num_waiting == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not gate.num_waiting
    pool.show(num_waiting=0)
    await settle()
    assert not pool.given


async def test_a_full_queue_takes_the_place_of_a_leaving_job() -> None:
    pool = Pool()
    gate = admission(pool, max_queued=1)
    pool.show(num_waiting=64)
    leaving = asyncio.create_task(run(gate, job("leaving", tenant="flood")))
    await settle()
    coming = asyncio.create_task(run(gate, job("coming", num_tokens=1, tenant="quiet")))
    leaving.cancel()  # it hears of it after the other one has come
    await settle()
    assert leaving.cancelled()
    assert gate.num_waiting == 1
    pool.show(num_waiting=0)
    pool.finish("coming")
    assert await coming
    assert pool.given == ["coming"]


def test_a_full_wait_has_a_retry_time_beyond_the_queue() -> None:
    async def scenario() -> None:
        pool = Pool()
        gate = admission(pool, max_queue_s=30.0)
        pool.show(num_waiting=64, num_requests=128)  # every seat is taken, though prompts are read quickly
        line = [asyncio.create_task(run(gate, job(f"r{n}"))) for n in range(4)]
        for refused in await asyncio.gather(*line, return_exceptions=True):
            assert isinstance(refused, Overloaded)
            assert refused.retry_after_s == 30.0, "nothing has begun in all that time: the most that anyone is told"

    run_virtually(scenario())


def test_a_full_queue_gives_a_time_by_its_pace() -> None:
    async def scenario() -> None:
        pool = Pool()
        gate = admission(pool, max_queued=10)
        pool.show(num_waiting=64, num_requests=128)
        running = [asyncio.create_task(run(gate, job(f"r{n}"))) for n in range(10)]
        for n in range(10, 18):  # 500 tokens every 2 s, of the 1,000 a second that could be read
            await asyncio.sleep(2.0)
            pool.show(num_waiting=63, queued_prefill_tokens=0)
            await settle()
            pool.finish(pool.given[-1])
            await settle()
            running.append(asyncio.create_task(run(gate, job(f"r{n}"))))
        await settle()
        with pytest.raises(Overloaded, match="10 requests wait") as refused:
            await run(gate, job("last"))
        assert refused.value.retry_after_s is not None
        assert 15.0 < refused.value.retry_after_s < 30.0, "eleven prompts at 250 tokens a second"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run_virtually(scenario())


async def test_nobody_waits_for_longer_than_a_request_may() -> None:
    pool = Pool()
    gate = admission(pool, max_queue_s=0.05)
    pool.show(num_waiting=64, queued_prefill_tokens=64_000)
    with pytest.raises(Overloaded, match=r"within 0\.05 s") as refused:
        await run(gate, job("a"))
    assert refused.value.retry_after_s == pytest.approx(64.0)
    assert not gate.num_waiting
    assert gate.refused.queue_timeout == 1


async def test_a_job_too_late_for_its_deadline_is_not_begun() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.show(num_waiting=64)
    waiting = asyncio.create_task(run(gate, job("a", num_tokens=1000, max_ttft_s=1.05)))
    await asyncio.sleep(0.1)  # of the 0.05 s that it had to spare
    pool.show(num_waiting=0)
    with pytest.raises(Overloaded, match="within its max_ttft_ms"):
        await waiting
    assert not pool.given
    assert gate.refused.queue_timeout == 1


async def test_no_job_passes_admitted_jobs_without_room() -> None:
    pool = Pool()
    gate = admission(pool)
    pool.num_turned_away = 1
    waiting = asyncio.create_task(run(gate, job("a")))
    await settle()
    assert not pool.given
    pool.num_turned_away = 0
    pool.finish("a")
    pool.show()
    await waiting
    assert pool.given == ["a"]
