"""A request that kills workers is found with few further losses, and none that was only beside it fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from cluster.simulate.world.clock import VirtualLoop, run_virtually
from protos.errors import RequestKillsWorkers
from router.dispatch.poison_requests import CrashHistory, PoisonRequests


@pytest.fixture
async def suspects() -> AsyncIterator[PoisonRequests]:
    made = PoisonRequests(max_worker_crashes=2, patience_s=1000.0)
    yield made
    made.assert_idle()


@dataclass(slots=True, eq=False)
class Worker:
    """One for all, as a pool of one has it: it dies of the poison, with all that it runs then."""

    suspects: PoisonRequests
    poisons: set[str]
    num_deaths: int = 0

    async def serve(self, name: str) -> str:
        """The fate of a job: "done", or "condemned"."""
        crashes = CrashHistory()
        try:
            while True:
                await self.suspects.turn(crashes)
                life = self.num_deaths
                if await self._runs(name):
                    self.suspects.progressed(crashes, 1)
                    return "done"
                await self.suspects.lost(name, crashes, ("w", life), 0, there_s=1.0)
        except RequestKillsWorkers:
            return "condemned"
        finally:
            self.suspects.drop(crashes)

    async def _runs(self, name: str) -> bool:
        """Runs until the next token or the worker's death. Jobs that begin in one turn of the loop run together."""
        life = self.num_deaths
        for turn in range(4):
            await asyncio.sleep(0)
            if turn == 2 and name in self.poisons and life == self.num_deaths:
                self.num_deaths += 1
        return life == self.num_deaths


async def test_the_second_worker_it_kills_alone_is_the_last(suspects: PoisonRequests) -> None:
    poison = CrashHistory()
    await suspects.lost("r", poison, ("w0", 1), 3, there_s=1.0)
    with pytest.raises(RequestKillsWorkers, match="2 workers when they died, the last of them w1"):
        await suspects.lost("r", poison, ("w1", 1), 3, there_s=1.0)
    assert suspects.num_rejected == 1


async def test_two_workers_of_one_host_die_of_the_host(suspects: PoisonRequests) -> None:
    """The job was sent to the second worker when that was dying already. A request that kills so fast is found by the
    next death."""
    job = CrashHistory()
    await suspects.lost("r", job, ("w0", 1), 3, there_s=9.0)
    await suspects.lost("r", job, ("w1", 1), 3, there_s=0.002)
    assert not suspects.num_rejected
    with pytest.raises(RequestKillsWorkers):
        await suspects.lost("r", job, ("w0", 2), 3, there_s=0.002)


async def test_one_who_has_gone_on_since_had_nothing_to_do_with_it(suspects: PoisonRequests) -> None:
    job = CrashHistory()
    for loss in range(10):
        await suspects.lost("r", job, (f"w{loss}", 1), loss, there_s=1.0)
    assert not suspects.num_rejected


async def struck_out(suspects: PoisonRequests, jobs: dict[str, CrashHistory]) -> None:
    """Two workers die within a moment, with all of them on both."""
    for life in (("w0", 1), ("w1", 1)):
        await asyncio.gather(*(suspects.lost(name, value, life, 0, there_s=1.0) for name, value in jobs.items()))


@pytest.mark.parametrize("count", [2, 3, 16, 61])
@pytest.mark.parametrize("num_poisons", [0, 1, 2])
async def test_the_guilty_are_found_by_halves_and_nobody_else_fails(
    suspects: PoisonRequests, count: int, num_poisons: int
) -> None:
    names = [f"r{number}" for number in range(count)]
    poisons = set(names[1 :: max(1, count // 2)][:num_poisons])
    worker = Worker(suspects, poisons)
    said = dict(zip(names, await asyncio.gather(*map(worker.serve, names)), strict=True))
    assert {name for name, value in said.items() if value == "condemned"} == poisons
    assert {value for name, value in said.items() if name not in poisons} <= {"done"}
    assert worker.num_deaths <= 2 + len(poisons) * (math.ceil(math.log2(count)) + 1)
    assert suspects.num_rejected == len(poisons)


async def test_two_unrelated_deaths_cost_no_answer(
    suspects: PoisonRequests,
) -> None:
    """Innocents by the dozen, tried a half at a time: not one after another."""
    jobs = {f"r{number}": CrashHistory() for number in range(16)}
    await struck_out(suspects, jobs)
    turns: list[str] = []

    async def attempt(name: str) -> None:
        await suspects.turn(jobs[name])
        turns.append(name)
        await asyncio.sleep(0)
        suspects.progressed(jobs[name], 1)

    first = asyncio.gather(*map(attempt, jobs))
    await asyncio.sleep(0)
    assert len(turns) == 8, "a half at once"
    await first
    assert len(turns) == 16


async def test_who_is_under_no_suspicion_waits_for_nobody(suspects: PoisonRequests) -> None:
    jobs = {name: CrashHistory() for name in ("a", "b")}
    await struck_out(suspects, jobs)
    held, free = jobs["a"], CrashHistory()
    assert not await suspects.turn(held)
    assert not await suspects.turn(free)
    waiting = asyncio.create_task(suspects.turn(jobs["b"]))
    await asyncio.sleep(0)
    assert not waiting.done()
    suspects.drop(held)
    suspects.drop(held)
    assert await waiting
    suspects.drop(jobs["b"])


def begin_times(*, count: int, each_s: float, patience_s: float) -> list[float]:
    """When each suspect may begin, if a trial takes `each_s` for each job, one after another."""
    began: list[float] = []

    async def main() -> None:
        suspects = PoisonRequests(max_worker_crashes=2, patience_s=patience_s)
        jobs = {f"r{number}": CrashHistory() for number in range(count)}
        await struck_out(suspects, jobs)
        one_at_a_time, clock = asyncio.Lock(), asyncio.get_running_loop().time
        start_s = clock()

        async def attempt(crashes: CrashHistory) -> None:
            await suspects.turn(crashes)
            began.append(clock() - start_s)
            async with one_at_a_time:
                await asyncio.sleep(each_s)
            suspects.progressed(crashes, 1)

        await asyncio.gather(*map(attempt, jobs.values()))
        suspects.assert_idle()

    run_virtually(main(), loop=VirtualLoop())
    return began


def test_patience_begins_anew_whenever_a_trial_makes_progress() -> None:
    """Eight trials of 20 s each before the second half's turn: longer than patience lasts, but the line moves."""
    assert begin_times(count=16, each_s=20.0, patience_s=30.0) == [0.0] * 8 + [160.0] * 8


def test_a_slow_batch_is_joined_by_the_next() -> None:
    assert begin_times(count=4, each_s=100.0, patience_s=30.0) == [0.0] * 2 + [30.0] * 2


def test_a_new_line_starts_with_one_batch() -> None:
    """Patience let a second and a third batch join the first, and these ended before it."""

    async def main() -> None:
        suspects = PoisonRequests(max_worker_crashes=2, patience_s=30.0)
        earlier = {f"r{number}": CrashHistory() for number in range(4)}
        for pair in (("r0", "r1"), ("r2", "r3")):
            await struck_out(suspects, {name: earlier[name] for name in pair})
        await asyncio.gather(*map(suspects.turn, earlier.values()))  # all four are tried by now
        for name in ("r1", "r2", "r3", "r0"):
            suspects.drop(earlier[name])
        later = {name: CrashHistory() for name in ("innocent", "poison")}
        await struck_out(suspects, later)
        turns = [asyncio.create_task(suspects.turn(job)) for job in later.values()]
        await asyncio.sleep(1.0)
        assert [turn.done() for turn in turns] == [True, False]
        for job in later.values():
            suspects.drop(job)
        await asyncio.gather(*turns)

    run_virtually(main(), loop=VirtualLoop())


async def test_jobs_that_leave_during_a_trial_block_nobody(suspects: PoisonRequests) -> None:
    jobs = {name: CrashHistory() for name in ("gone", "stays")}
    await asyncio.gather(*(suspects.lost(name, value, ("w0", 1), 0, there_s=1.0) for name, value in jobs.items()))
    losses = {
        name: asyncio.create_task(suspects.lost(name, value, ("w1", 1), 0, there_s=1.0)) for name, value in jobs.items()
    }
    await asyncio.sleep(0)
    losses["gone"].cancel()
    await losses["stays"]
    await suspects.turn(jobs["stays"])
    with pytest.raises(RequestKillsWorkers):
        await suspects.lost("stays", jobs["stays"], ("w2", 1), 0, there_s=1.0)
