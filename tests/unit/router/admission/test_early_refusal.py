"""Requests that the measured rate does not start in time are refused on arrival, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos.errors import Overloaded
from tests.unit.cluster.virtual_time import run_virtually
from tests.unit.router.admission.test_admission import Pool, admission, job, run, settle


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


@dataclass(frozen=True, kw_only=True)
class Fate:
    tenant: str
    begun: bool
    after_s: float
    retry_after_s: float | None = None


async def fates(pool: Seats, arrivals: Sequence[tuple[float, str, int]], **settings: Any) -> list[Fate]:
    """How the requests of `arrivals` (the pause before each, its tenant, its prompt tokens) end."""
    gate = admission(pool, **settings)
    loop = asyncio.get_running_loop()

    async def fate(name: str, tenant: str, num_tokens: int) -> Fate:
        began_s = loop.time()
        try:
            await run(gate, job(name, num_tokens=num_tokens, tenant=tenant))
        except Overloaded as refused:
            return Fate(tenant=tenant, begun=False, after_s=loop.time() - began_s, retry_after_s=refused.retry_after_s)
        return Fate(tenant=tenant, begun=True, after_s=loop.time() - began_s)

    serving = asyncio.create_task(pool.serve())
    running = []
    for number, (pause_s, tenant, num_tokens) in enumerate(arrivals):
        await asyncio.sleep(pause_s)
        running.append(asyncio.create_task(fate(f"{tenant}{number}", tenant, num_tokens)))
    found = await asyncio.gather(*running)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    gate.check_integrity()
    return found


def test_at_three_times_the_rate_requests_are_refused_on_arrival() -> None:
    async def scenario() -> None:
        found = await fates(Seats(every_s=1.0), [(1 / 3, "", 500)] * 300)
        refused = [fate for fate in found if not fate.begun]
        late = [fate for fate in refused if fate.after_s > 1.0]
        assert len(refused) > 150
        assert len(late) <= 3
        assert sum(fate.begun for fate in found) >= 95, "workers are as busy as without refusals"
        assert all(fate.retry_after_s is not None and 0 < fate.retry_after_s <= 30 for fate in refused)

    run_virtually(scenario())


def test_requests_are_refused_by_no_rate_that_is_not_measured() -> None:
    async def scenario() -> None:
        pool = Seats(every_s=0.2)
        pool.every_s = 10.0  # before the first has begun, all slots are held for 10 s
        asyncio.get_running_loop().call_later(10.5, setattr, pool, "every_s", 0.2)
        found = await fates(pool, [(0.1, "", 500)] * 60)
        assert all(fate.begun for fate in found)

    run_virtually(scenario())


def test_a_flooding_tenant_does_not_get_a_quiet_one_refused() -> None:
    async def scenario() -> None:
        flood = [(1 / 3, "flood", 500)] * 15
        pool = Seats(every_s=1.0)
        asyncio.get_running_loop().call_later(55.0, setattr, pool, "every_s", 3.0)  # the flood's row is too long now
        found = await fates(pool, [*flood * 5, *[(0.0, "quiet", 500), *flood] * 8, (0.0, "quiet", 12_000)])
        assert all(fate.begun for fate in found if fate.tenant == "quiet")
        assert sum(not fate.begun for fate in found) > 60

    run_virtually(scenario())
