"""A request that kills workers is stopped after two; who was only beside it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from protos.errors import Overloaded, RequestKillsWorkers
from router.suspects import Suspects, Suspicion


async def verdicts(suspects: Suspects, jobs: dict[str, Suspicion], life: tuple[str, int], num_tokens: int) -> list[str]:
    """Who is condemned when a worker is lost with all these jobs on it."""
    losses = [suspects.lost(name, one, life, num_tokens) for name, one in jobs.items()]
    said: Sequence[BaseException | None] = await asyncio.gather(*losses, return_exceptions=True)
    return [name for name, one in zip(jobs, said, strict=True) if isinstance(one, RequestKillsWorkers)]


async def test_the_second_worker_it_kills_alone_is_the_last() -> None:
    suspects, poison = Suspects(max_kills=2), Suspicion()
    await suspects.lost("r", poison, ("w0", 1), 3)
    with pytest.raises(RequestKillsWorkers, match="2 workers when they died, the last of them w1"):
        await suspects.lost("r", poison, ("w1", 1), 3)
    assert suspects.num_condemned == 1


async def test_one_who_has_gone_on_since_had_nothing_to_do_with_it() -> None:
    suspects, job = Suspects(max_kills=2), Suspicion()
    for loss in range(10):
        await suspects.lost("r", job, (f"w{loss}", 1), loss)
    assert not suspects.num_condemned


async def test_jobs_that_died_together_twice_are_tried_apart_and_only_the_guilty_one_is_condemned() -> None:
    suspects = Suspects(max_kills=2)
    jobs = {name: Suspicion() for name in ("poison", "beside", "beside too")}
    assert await verdicts(suspects, jobs, ("w0", 1), 0) == []
    assert await verdicts(suspects, jobs, ("w1", 1), 0) == []
    order: list[str] = []

    async def attempt(name: str) -> None:
        trial = suspects.trial(jobs[name])
        await trial.begin(patience_s=30.0)
        try:
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            if name == "poison":
                await suspects.lost(name, jobs[name], ("w2", 1), 0)
            trial.progressed(0)
            order.append(f"{name} goes on")
            trial.progressed(1)
            await asyncio.sleep(0)
        finally:
            trial.end()

    said = await asyncio.gather(*(attempt(name) for name in jobs), return_exceptions=True)
    assert [type(one) for one in said] == [RequestKillsWorkers, type(None), type(None)]
    assert order == ["poison begins", "beside begins", "beside goes on", "beside too begins", "beside too goes on"]
    assert await verdicts(suspects, {"beside": jobs["beside"]}, ("w3", 1), 1) == []


async def test_who_is_under_no_suspicion_waits_for_nobody() -> None:
    suspects = Suspects(max_kills=2)
    held = suspects.trial(Suspicion(apart=True))
    await held.begin(patience_s=30.0)
    free = suspects.trial(Suspicion())
    await free.begin(patience_s=0.0)
    with pytest.raises(Overloaded, match="one by one"):
        await suspects.trial(Suspicion(apart=True)).begin(patience_s=0.01)
    held.end()
    held.end()
    again = suspects.trial(Suspicion(apart=True))
    await again.begin(patience_s=30.0)
    again.end()
