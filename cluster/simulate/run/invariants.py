"""Invariants of the cluster under any fault, besides clients' tokens and watched workers' calls (`clients`,
`node.watched_parts`):

- with every event, of each worker that acted: references to blocks match their holders, no ticket outlives its lease or
  lane, none stops without a reason
- a few times a second: a request that has ended holds nothing two seconds later
- every few seconds: every waiting client has received something
- at intervals: block by block who holds it; queues are bounded; some gateway counts on all that a worker holds
- at the end: nothing is held or counted, lost workers are back, gateways know exactly what workers cache
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cluster.simulate.node.simulated_worker import SimulatedWorker
from cluster.simulate.run.clients import Clients
from cluster.simulate.run.deployment import SimulatedDeployment, SimulatedGateway
from protos.values import BlockHash, BlockStored, Tier
from router.fleet.member import WorkerState
from router.fleet.offers import ELSEWHERE_S
from workers.scheduling.request import State

SETTLING_S = 60.0
"""A cluster must release everything so long after the last request."""


LOOK_S = 0.25
WAITING_LOOK_S = 5.0
ORPHANED_S = 2.0
CALM_S = 6.0
"""By then requests hurt by the last fault have ended."""


class Invariants:
    """Raises AssertionError. `forgetful`: a fault deleted gateways' knowledge, so they may know too little."""

    def __init__(self, deployment: SimulatedDeployment, clients: Clients, *, forgetful: bool = False) -> None:
        self._deployment = deployment
        self._clients = clients
        self._every = deployment.config.audit_every
        self._patience_s = deployment.config.patience_s
        self._forgetful = forgetful
        self._look_s = self._orphans_look_s = 0.0
        self._orphans: dict[tuple[SimulatedWorker, str], float] = {}  # requests without a client, and the time since
        self._num_events = 0
        self._seen: dict[SimulatedWorker, int] = {}
        self._loop = asyncio.get_running_loop()

    def after_event(self) -> None:
        self._num_events += 1
        self._deployment.assert_no_faults()
        if self._loop.time() >= self._look_s:
            self._look_s = self._loop.time() + WAITING_LOOK_S
            self._check_progress()
        if not self._every:
            return
        if self._loop.time() >= self._orphans_look_s:
            self._orphans_look_s = self._loop.time() + LOOK_S
            self._check_orphans()
        assert not self._deployment.stuck, f"{self._deployment.stuck[0]}, and nothing held it up"
        for worker in self._deployment.workers.values():
            if worker.turns.num_turns != self._seen.get(worker):
                self._seen[worker] = worker.turns.num_turns
                worker.check_balance()
        if self._num_events % self._every == 0:
            self.audit()

    def audit(self) -> None:
        for gateway in self._deployment.gateways:
            num_waiting, limit = gateway.admission.num_waiting, self._deployment.config.router.admission.max_queued
            assert num_waiting <= limit, f"{num_waiting} wait in line at {gateway.name}, {limit} may"
            gateway.admission.check_integrity()
        for worker in self._deployment.workers.values():
            worker.turns.flush()
            worker.check()
            _check_queues(worker)

    async def when_idle(self) -> None:
        """Waits until nothing is held or transferred, and every worker is back."""
        lives: dict[str, int] = {}
        for look in range(int(SETTLING_S / LOOK_S)):
            if not self._is_busy() and not self._missing():
                break
            if look == int(CALM_S / LOOK_S):
                lives = self._lives()
            await asyncio.sleep(LOOK_S)
        lost = [worker_id for worker_id, life in lives.items() if self._lives().get(worker_id, life) != life]
        assert not lost, f"{lost[0]} ended {CALM_S:.0f} s after the last fault and request, or later: what did it hold?"
        if self._deployment.config.shared_index:
            await asyncio.sleep(ELSEWHERE_S)  # prompts of other gateways count for so long
        self.audit()
        assert not self._clients.running
        assert not (missing := self._missing()), f"{missing[0]} {SETTLING_S:.0f} s after the last request"
        for worker in self._deployment.workers.values():
            worker.assert_idle()
        self._deployment.gaps.assert_idle()
        for gateway in self._deployment.gateways:
            self._check_idle(gateway)

    def _check_progress(self) -> None:
        now = self._loop.time()
        for request in self._clients.running.values():
            silent_s = now - request.last_message_s
            assert silent_s < self._patience_s, f"{request.request_id} has heard nothing for {silent_s:.1f} s"

    def _check_orphans(self) -> None:
        """Checks that a worker releases ended requests after the running step."""
        now, seen = self._loop.time(), self._orphans
        self._orphans = {}
        for worker in self._deployment.workers.values():
            if worker.held_up:
                continue
            for request in worker.engine.scheduler.requests():
                if request.request_id.rpartition(".")[0] not in self._clients.running:
                    since_s = self._orphans[worker, request.request_id] = seen.get((worker, request.request_id), now)
                    bound_s = ORPHANED_S + 2 * max(worker.device.last_s, worker.device.before_s)
                    assert now - since_s < bound_s, (
                        f"{worker.worker_id} has {request.request_id} still, which ended {now - since_s:.1f} s ago"
                    )

    def _is_busy(self) -> bool:
        return any(worker.busy for worker in self._deployment.workers.values())

    def _lives(self) -> dict[str, int]:
        workers = self._deployment.workers.values()
        return {worker.worker_id: worker.info.incarnation for worker in workers if not worker.engine.draining}

    def _missing(self) -> list[str]:
        deployment = self._deployment
        gone = [plan.worker_id for plan in deployment.plans if plan.worker_id not in deployment.workers]
        return [f"{worker_id} was not started again" for worker_id in gone] + [
            f"{gateway.name} takes {member.worker_id} for {member.state}"
            for gateway in deployment.gateways
            for member in gateway.fleet.status()
            if member.state is not WorkerState.READY
        ]

    def _check_idle(self, gateway: SimulatedGateway) -> None:
        assert not gateway.fleet.offers.num_turned_away, f"{gateway.name} believes that somebody waits for room"
        gateway.admission.assert_idle()
        gateway.dispatcher.assert_idle()
        members = gateway.fleet.status()
        assert {member.worker_id for member in members} == self._deployment.workers.keys()
        for member in members:
            assert not member.num_routed, (
                f"{gateway.name} counts {member.num_routed} on their way to {member.worker_id}"
            )
            self._check_index(gateway, self._deployment.workers[member.worker_id])

    def _check_index(self, gateway: SimulatedGateway, worker: SimulatedWorker) -> None:
        """Checks that a gateway with all events has exactly the cached blocks."""
        log, received = worker.log, gateway.fleet.feed.position(worker.worker_id)
        published = (log.incarnation, log.next_seq)
        assert received <= published, f"{gateway.name} has heard of {received}, {worker.worker_id} has said {published}"
        if received < published:  # the last events were lost: the next message reveals the gap
            return
        indexed, cached = _blocks(gateway.local.blocks(worker.worker_id)), _blocks(worker.engine.pool.snapshot())
        stale, unknown = len(indexed - cached), len(cached - indexed)
        assert not stale, f"{gateway.name} knows of {stale} blocks that {worker.worker_id} does not have any more"
        assert self._forgetful or not unknown, f"{gateway.name} knows nothing of {unknown} blocks of {worker.worker_id}"


def _blocks(chains: Iterable[BlockStored]) -> set[tuple[Tier, BlockHash]]:
    return {(chain.tier, block_hash) for chain in chains for block_hash in chain.hashes}


def _check_queues(worker: SimulatedWorker) -> None:
    """`max_waiting` bounds the requests without a ticket that have not begun."""
    scheduler = worker.engine.scheduler
    waiting = [request for request in scheduler.requests() if request.state is State.WAITING]
    num_waiting = sum(request.ticket is None and not request.num_preemptions for request in waiting)
    limit = scheduler.config.max_waiting
    assert num_waiting <= limit, f"{num_waiting} wait on {worker.worker_id}, {limit} may"
