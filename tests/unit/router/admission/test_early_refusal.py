"""Requests that the measured rate does not start in time are refused on arrival, and no others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from protos.errors import Overloaded
from protos.values import FinishReason, SamplingParams
from router.jobs import Job, TokenDelta
from tests.unit.cluster.virtual_time import run_virtually
from tests.unit.router.admission.test_admission import Pool, admission, job, settle

KEEP_ALIVE_S = 15.0  # a stream has the status 200 then


class Seats(Pool):
    """One request begins every `every_s` seconds, as on a worker whose batch slots are full."""

    def __init__(self, *, every_s: float) -> None:
        super().__init__()
        self.every_s = every_s
        self.show(num_waiting=64, num_requests=128)

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            num_given = len(self.given)
            self.show(num_waiting=63, queued_prefill_tokens=0)
            await settle()
            self.show(num_waiting=64, queued_prefill_tokens=0)
            for name in self.given[num_given:]:
                self.finish(name)


class Slots(Pool):
    """A prefill worker that computes prompts at once, and a decode worker with 64 slots of 31 tokens a second."""

    def __init__(self, length: Callable[[str], int]) -> None:
        super().__init__()
        self.length = length
        self.num_running = 0
        self.waiting: list[asyncio.Future[None]] = []

    async def serve(self) -> None:
        await asyncio.Event().wait()

    def changed(self) -> None:
        self.show(num_waiting=len(self.waiting), num_requests=self.num_running + len(self.waiting))

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(token_ids=(1,))
        if self.num_running < 64:
            self.num_running += 1
        else:
            self.waiting.append(asyncio.get_running_loop().create_future())
            self.changed()
            await self.waiting[-1]
        self.changed()
        num_left = self.length(job.request_id) - 1
        while num_left > 0:
            num_tokens = min(num_left, 31)
            await asyncio.sleep(num_tokens / 31)
            num_left -= num_tokens
            yield TokenDelta(token_ids=(1,) * num_tokens)
        if self.waiting:
            self.waiting.pop(0).set_result(None)
        else:
            self.num_running -= 1
        self.changed()
        yield TokenDelta(finish_reason=FinishReason.LENGTH)


def of_400(name: str) -> int:
    """The length of an answer: 5 begin a second, 256 within the first 30 s."""
    return 400


def of_about_300(name: str) -> int:
    """Answers that the model ends: 6.6 begin a second."""
    return 1 + int(random.Random(name).expovariate(1 / 300))


@dataclass(frozen=True, kw_only=True)
class Fate:
    tenant: str
    begun: bool
    after_s: float
    retry_after_s: float | None = None


async def fates(
    pool: Seats | Slots,
    arrivals: Sequence[tuple[float, str, int]],
    *,
    max_tokens: int = 16,
    returns: bool = False,
    **settings: Any,
) -> list[Fate]:
    """The outcomes of requests with these `arrivals` (pause, tenant, prompt tokens). With `returns` a refused request
    is sent once more after its `Retry-After`."""
    gate = admission(pool, **settings)
    loop = asyncio.get_running_loop()

    async def fate(name: str, tenant: str, num_tokens: int, *, returns: bool) -> Fate:
        began_s = loop.time()
        asked = replace(job(name, num_tokens=num_tokens, tenant=tenant), sampling=SamplingParams(max_tokens=max_tokens))
        try:
            async with aclosing(gate(asked)) as deltas:
                await anext(deltas)
                after_s = loop.time() - began_s
                async for _ in deltas:
                    pass
        except Overloaded as refused:
            if returns:
                await asyncio.sleep(refused.retry_after_s or 0.0)
                return await fate(f"{name}-again", tenant, num_tokens, returns=False)
            return Fate(tenant=tenant, begun=False, after_s=loop.time() - began_s, retry_after_s=refused.retry_after_s)
        return Fate(tenant=tenant, begun=True, after_s=after_s)

    serving = asyncio.create_task(pool.serve())
    running = []
    for number, (pause_s, tenant, num_tokens) in enumerate(arrivals):
        await asyncio.sleep(pause_s)
        running.append(asyncio.create_task(fate(f"{tenant}{number}", tenant, num_tokens, returns=returns)))
    outcomes = await asyncio.gather(*running)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    gate.check_integrity()
    return outcomes


def test_at_three_times_the_rate_requests_are_refused_on_arrival() -> None:
    async def scenario() -> None:
        outcomes = await fates(Seats(every_s=1.0), [(1 / 3, "", 500)] * 300)
        refused = [fate for fate in outcomes if not fate.begun]
        late = [fate for fate in refused if fate.after_s > 1.0]
        assert len(refused) > 150
        assert len(late) <= 3
        assert sum(fate.begun for fate in outcomes) >= 95, "workers are as busy as without refusals"
        assert all(fate.retry_after_s is not None and 0 < fate.retry_after_s <= 30 for fate in refused)

    run_virtually(scenario())


@pytest.mark.parametrize(
    ("length", "num_begun", "arrivals"),
    [
        (of_400, 256, [(1 / 300, "", 8)] * 1800),
        (of_about_300, 300, [(1 / 300, "", 8)] * 1800),
        (of_400, 450, [(1 / 15, "", 8)] * 900),
        (of_about_300, 600, [(1 / 20, "", 8)] * 1200),
    ],
    ids=["a burst of equal answers", "a burst", "three times the rate, equal answers", "three times the rate"],
)
def test_no_stream_begins_and_is_then_refused(
    length: Callable[[str], int], num_begun: int, arrivals: Sequence[tuple[float, str, int]]
) -> None:
    outcomes = run_virtually(fates(Slots(length), arrivals, max_tokens=400 if length is of_400 else 4096))
    refused = [fate for fate in outcomes if not fate.begun]
    assert max(fate.after_s for fate in refused) < KEEP_ALIVE_S
    assert sum(fate.begun for fate in outcomes) >= num_begun, "slots are as busy as without refusals"
    assert all(fate.retry_after_s is not None and 0 < fate.retry_after_s <= 40 for fate in refused)


@pytest.mark.parametrize(
    ("length", "max_tokens", "num"), [(of_400, 400, 256), (of_400, 8000, 256), (of_about_300, 4096, 270)]
)
def test_a_burst_that_fits_loses_no_request(length: Callable[[str], int], max_tokens: int, num: int) -> None:
    outcomes = run_virtually(fates(Slots(length), [(1 / 256, "", 8)] * num, max_tokens=max_tokens))
    assert all(fate.begun for fate in outcomes)


@pytest.mark.parametrize(
    ("num_long", "least_s", "most_s", "num", "every_s"),
    [(8, 2.0, 2.0, 300, 0.007), (16, 5.0, 5.0, 265, 0.022), (40, 2.0, 2.0, 300, 0.007), (16, 2.0, 5.0, 300, 0.01)],
)
def test_a_burst_beside_long_answers_loses_no_request(
    num_long: int, least_s: float, most_s: float, num: int, every_s: float
) -> None:
    """Long answers do not stand for all. The last request of each burst begins within 24 s."""

    def length(name: str) -> int:
        return 31 * 600 if name.startswith("long") else int(31 * random.Random(name).uniform(least_s, most_s))

    arrivals = [(0.0, "long", 8)] * num_long + [(200.0, "", 8)] + [(every_s, "", 8)] * num
    assert all(fate.begun for fate in run_virtually(fates(Slots(length), arrivals, max_tokens=20_000)))


def test_a_burst_beside_a_few_long_answers_loses_no_request() -> None:
    """Long answers do not stand for all. 56 slots of 2 s serve 28 a second."""
    arrivals = [(0.0, "long", 8)] * 8 + [(200.0, "", 8)] + [(0.04, "", 8)] * 200 + [(0.002, "", 8)] * 200
    pool = Slots(lambda name: 31 * 300 if name.startswith("long") else 62)
    assert all(fate.begun for fate in run_virtually(fates(pool, arrivals, max_tokens=10_000)))


def test_after_its_retry_time_a_refused_request_is_served() -> None:
    outcomes = run_virtually(fates(Slots(of_about_300), [(1 / 300, "", 8)] * 500, max_tokens=400, returns=True))
    assert sum(not fate.begun for fate in outcomes) <= 5


def test_few_slots_that_turn_over_at_once_refuse_nothing() -> None:
    """More than eight answers end before a rate is measured."""
    outcomes = run_virtually(fates(Seats(every_s=0.05), [(0.02, "", 8)] * 100))
    assert all(fate.begun for fate in outcomes)


def test_requests_are_refused_by_no_rate_that_is_not_measured() -> None:
    async def scenario() -> None:
        pool = Seats(every_s=0.2)
        pool.every_s = 10.0  # before the first has begun, all slots are held for 10 s
        asyncio.get_running_loop().call_later(10.5, setattr, pool, "every_s", 0.2)
        outcomes = await fates(pool, [(0.1, "", 500)] * 60)
        assert all(fate.begun for fate in outcomes)

    run_virtually(scenario())


def test_too_few_ends_refuse_nothing() -> None:
    outcomes = run_virtually(fates(Seats(every_s=0.01), [(0.0, "", 500)] * 40 + [(0.012, "", 500)] * 40))
    assert all(fate.begun for fate in outcomes)


def test_a_flooding_tenant_does_not_get_a_quiet_one_refused() -> None:
    async def scenario() -> None:
        flood = [(1 / 3, "flood", 500)] * 15
        pool = Seats(every_s=1.0)
        asyncio.get_running_loop().call_later(55.0, setattr, pool, "every_s", 3.0)  # the flood's row is too long now
        outcomes = await fates(pool, [*flood * 5, *[(0.0, "quiet", 500), *flood] * 8, (0.0, "quiet", 12_000)])
        assert all(fate.begun for fate in outcomes if fate.tenant == "quiet")
        assert sum(not fate.begun for fate in outcomes) > 60

    run_virtually(scenario())
