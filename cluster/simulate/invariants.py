"""What must hold whatever happens: looked at after every event in part, and in full every so often and at the end.

each request ends exactly once, with exactly its tokens    by its client, with every token (`client`)
no block leaks, is freed early or has two owners           here, from engine, ledger and pool: numbers, of workers that
                                                           did something; block by block every so often
queues stay bounded; whoever waits hears something         here, every so often
"""

from __future__ import annotations

import asyncio

from cluster.simulate.client import Clients
from cluster.simulate.deployment import Deployment
from cluster.simulate.worker import SimulatedWorker

SETTLING_S = 60.0
"""How long after the last request a cluster may take until nothing is held any more: leases end, lanes give up."""


LOOK_S = 0.25


class Invariants:
    """`after_event` is for the loop; `when_idle` for the end. Both raise AssertionError."""

    def __init__(self, deployment: Deployment, clients: Clients) -> None:
        self._deployment = deployment
        self._clients = clients
        self._every = deployment.config.audit_every
        self._patience_s = deployment.config.patience_s
        self._num_events = 0
        self._seen: dict[SimulatedWorker, int] = {}
        self._loop = asyncio.get_running_loop()

    def after_event(self) -> None:
        self._num_events += 1
        self._deployment.assert_no_faults()
        if not self._every:
            return
        for worker in self._deployment.workers.values():
            if worker.turns.num_turns != self._seen.get(worker):
                self._seen[worker] = worker.turns.num_turns
                worker.check_balance()
        if self._num_events % self._every == 0:
            self.audit()

    def audit(self) -> None:
        now = self._loop.time()
        for asked in self._clients.asked.values():
            silent_s = now - asked.heard_s
            assert silent_s < self._patience_s, f"{asked.request_id} has heard nothing for {silent_s:.1f} s"
        for gateway in self._deployment.gateways:
            assert gateway.admission.num_waiting <= self._deployment.config.router.max_queued
        for worker in self._deployment.workers.values():
            worker.turns.settle()
            worker.check()
            _check_queues(worker)

    async def when_idle(self) -> None:
        """Nobody asks any more: soon nothing is held, moved or waited for."""
        for _ in range(int(SETTLING_S / LOOK_S)):
            if not any(worker.busy for worker in self._deployment.workers.values()):
                break
            await asyncio.sleep(LOOK_S)
        self.audit()
        assert not self._clients.asked
        for worker in self._deployment.workers.values():
            worker.assert_idle()


def _check_queues(worker: SimulatedWorker) -> None:
    scheduler = worker.engine.scheduler
    limit = scheduler.config.max_waiting + len(worker.role.ledger)
    assert scheduler.num_waiting <= limit + scheduler.config.max_num_seqs, f"{worker.worker_id} lets too many wait"
