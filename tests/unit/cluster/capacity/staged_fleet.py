"""An actuator that does what the test says, and orders for its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

from cluster.supervision.worker_placement import missing
from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.fleet_owner import DesiredFleet, FleetOrder, OrderKind, Revision

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
CONFIGURED = DesiredFleet(counts={PREFILL: 1, DECODE: 2})


class StagedFleet:
    """An actuator. `there` are the workers that serve; the test moves it and ends changes."""

    def __init__(self) -> None:
        self.desired = {"prefill-0": PREFILL, "decode-0": DECODE, "decode-1": DECODE}
        self.there = dict(self.desired)
        self.most = 8
        self.begun: list[asyncio.Future[None]] = []
        self.mixes: list[tuple[str, dict[WorkerRole, int], dict[WorkerRole, int]]] = []  # of rolls

    async def begin(
        self,
        counts: Mapping[WorkerRole, int],
        flips: Mapping[str, WorkerRole] | None = None,
        *,
        revision: Revision | None = None,
        kept: Mapping[WorkerRole, int] | None = None,
    ) -> Awaitable[None]:
        if revision is not None:
            self.mixes.append((revision.name, dict(counts), dict(kept or {})))
            counts = {role: count + (kept or {}).get(role, 0) for role, count in counts.items()}
        if sum(counts.values()) > self.most:
            raise Misconfigured(f"{sum(counts.values())} GPUs, and there are {self.most}", param="counts")
        names = [(f"{role}-{number}", role) for role, count in counts.items() for number in range(count)]
        self.desired = {**self.desired, **flips} if flips else dict(names)
        if self.begun and not self.begun[-1].done():
            self.begun[-1].set_result(None)  # a later desired state has replaced it
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]

    def arrive(self) -> None:
        self.there = dict(self.desired)
        self.begun[-1].set_result(None)

    def roles(self) -> Mapping[str, WorkerRole]:
        return self.desired

    def serving(self) -> Mapping[str, WorkerRole]:
        return self.there

    def start_s(self) -> float:
        return 6.0

    def waiting_for(self) -> Sequence[str]:
        return missing(self.desired, self.there)


def scale(**counts: int) -> FleetOrder:
    return FleetOrder(
        kind=OrderKind.SCALE, counts={WorkerRole(role): count for role, count in counts.items()}, who="ann", why="load"
    )


def flip(worker_id: str, role: WorkerRole) -> FleetOrder:
    return FleetOrder(kind=OrderKind.FLIP, worker_id=worker_id, role=role)
