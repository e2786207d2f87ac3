"""The simulated cluster: supervised workers, and gateways that are connected to them.

Supervisor ─ launch ─▶ SimulatedWorker ... ─ Serving ─▶ announce ─▶ Fleet of every Gateway ─▶ Dispatcher, Admission
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from cluster.simulate.node.device import DeviceWork
from cluster.simulate.node.itl import Gaps
from cluster.simulate.node.simulated_worker import SimulatedWorker
from cluster.simulate.run.simulation_config import SimulationConfig
from cluster.simulate.world.event_log import SimulationLog
from cluster.simulate.world.fake_redis import FakeRedisClient, Server
from cluster.simulate.world.network import VALUES, Network
from cluster.simulate.world.simulated_lanes import Lanes
from cluster.supervision.health import WorkerCalls
from cluster.supervision.rank import Event, Loading, Serving
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_placement import NodeResources, WorkerPlan, missing, plan, replan
from protos.errors import BatonError, WorkerLost
from protos.values import WorkerLoad, WorkerRole
from router.build_router import build_router
from router.fleet.successors import Successor
from router.fleet.worker_client import WorkerClient
from router.fleet_owner import Revision
from router.jobs import Job
from router.prefix.feed import Feed
from router.prefix.index import NO_MATCH
from router.prefix.redis_index import RedisFeed
from router.prefix.redis_store import Store
from router.prefix.registry import local_index

HEALTH_TIMEOUT_S = 2.0


class SimulatedGateway:
    """One life of a gateway: the router without its faces."""

    def __init__(self, name: str, config: SimulationConfig, network: Network, store: Server | None) -> None:
        self.name = name
        self.local = local_index()
        self.feed = Feed(self.local, gateway_id=name)
        self._client: FakeRedisClient | None = None
        if store is not None:
            self._client = FakeRedisClient(store)
            gateway_store = Store(self._client, model=config.router.model_name, gateway_id=name)
            self.feed = RedisFeed(self.local, gateway_store)
        router = build_router(
            config.router,
            feed=self.feed,
            open_channel=network.open_channel,
            encoding=VALUES,
        )
        self.fleet, self.records = router.fleet, router.routing.records
        self.dispatcher, self.admission, self.idle = router.dispatcher, router.admission, router.idle
        self.requests: dict[asyncio.Task[None], None] = {}
        self.alive = True

    async def start(self) -> None:
        """Returns when it has the other gateways' knowledge."""
        await self.feed.start()

    async def stop(self) -> None:
        await self.fleet.close()
        await self.feed.close()

    async def kill(self) -> None:
        """Ends every running answer, without an error to clients."""
        self.alive = False
        if self._client is not None:
            self._client.dead = True
        for task in tuple(self.requests):
            task.cancel()
        await self.stop()

    def assert_no_faults(self) -> None:
        assert self.fleet.num_faults == 0, f"{self.name} met a fault of our own: see its log"
        assert not isinstance(self.feed, RedisFeed) or self.feed.num_faults == 0, (
            f"{self.name} met one of its shared index: see its log"
        )

    @asynccontextmanager
    async def traced(self, job: Job) -> AsyncIterator[None]:
        """Keeps the request's trace open until it ends, however that is."""
        self.records.open([job])
        error: BaseException | None = None
        try:
            yield
        except BaseException as failed:
            error = failed
            raise
        finally:
            self.records.close([job], error)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """`lived_s`: from its launch to its end; `load`: at its end."""

    worker_id: str
    role: WorkerRole
    lived_s: float
    work: DeviceWork
    load: WorkerLoad


class SimulatedDeployment:
    """`untroubled`: no fault will happen. `served`: workers that have ended; `stuck`: workers that made no progress
    although nothing held them up. `num_made` counts all workers."""

    def __init__(self, config: SimulationConfig, event_log: SimulationLog, *, untroubled: bool = False) -> None:
        self.config = config
        self._untroubled = untroubled
        self.event_log = event_log
        self.network = Network(config.wire, random.Random(f"{config.seed} network"))
        self.lanes = Lanes(config.cards)
        self.store = Server() if config.shared_index else None
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: list[SimulatedGateway] = []
        self.plans: Sequence[WorkerPlan] = ()
        self.served: list[WorkerLife] = []
        self.stuck: list[str] = []
        self.num_made = 0
        self.gaps = Gaps()
        self._skews = random.Random(f"{config.seed} clocks")
        self._num_gateways = 0
        self._loop = asyncio.get_running_loop()
        self._supervisor: Supervisor | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when every worker serves and every gateway knows it."""
        config = self.config
        num_gpus = sum(config.pools.counts().values())
        pools = replace(config.pools, prefill_tp=None, decode_tp=None)  # a simulated worker is one rank
        self.plans = plan(pools, [NodeResources(cpus=1.0, gpus=num_gpus)], tp=1, device="cuda")
        for _ in range(config.num_gateways):
            await self._open_gateway().start()
        self._supervisor = Supervisor(
            launcher=self,
            announcer=self,
            control=_Calls(self),
            config=config.supervision,
            first_incarnation=0,
        )
        self._supervising = asyncio.create_task(self._supervisor.run(self.plans), name="supervisor")
        await self._supervisor.ready()
        for gateway in self.gateways:
            while len(gateway.fleet.offers.candidates(NO_MATCH, 1)) < len(self.plans):
                await gateway.fleet.offers.wait(until=self._loop.time() + 60.0)

    async def begin(
        self,
        counts: Mapping[WorkerRole, int],
        flips: Mapping[str, WorkerRole] | None = None,
        *,
        revision: Revision | None = None,
        kept: Mapping[WorkerRole, int] | None = None,
    ) -> Awaitable[None]:
        """Begins a fleet of any size: the simulated machines hold any number of workers of one revision."""
        assert self._supervisor is not None
        assert revision is None
        pools = replace(self.config.pools, prefill_tp=None, decode_tp=None).with_counts(counts)
        nodes = [NodeResources(cpus=1.0, gpus=sum(counts.values()))]
        self.plans = replan(self._supervisor.plans, pools, nodes, tp=1, flips=flips)
        return asyncio.ensure_future(self._supervisor.resize(self.plans))

    def roles(self) -> Mapping[str, WorkerRole]:
        return {plan.worker_id: plan.role for plan in self.plans}

    def serving(self) -> Mapping[str, WorkerRole]:
        return {worker_id: worker.info.role for worker_id, worker in self.workers.items()}

    def waiting_for(self) -> Sequence[str]:
        return missing(self.roles(), self.serving())

    def start_s(self) -> float:
        return self.config.load_s

    async def ready(self) -> None:
        """Returns when the desired workers serve, and no others."""
        assert self._supervisor is not None
        if self.waiting_for():
            await self._supervisor.ready()

    async def stop(self) -> None:
        assert self._supervisor is not None
        assert self._supervising is not None
        for gateway in self.gateways:
            await gateway.stop()
        self._supervising.cancel()
        await self._supervisor.stop()
        await asyncio.wait([self._supervising])

    def gateway_for(self, number: int) -> SimulatedGateway:
        return self.gateways[number % len(self.gateways)]

    def end_leaps(self) -> None:
        for worker in self.workers.values():
            worker.turns.flush()

    def assert_no_faults(self) -> None:
        """Asserts that loops that survive internal errors have met none."""
        num_faults = self._supervisor.num_faults if self._supervisor is not None else 0
        assert num_faults == 0, "the supervisor met a fault of our own: see its log"
        for gateway in self.gateways:
            gateway.assert_no_faults()

    def clear_index(self, place: int) -> None:
        for planned in self.plans:
            self.gateways[place].local.drop(planned.worker_id)

    # -- gateways ------------------------------------------------------------------------------------------------------

    def _open_gateway(self) -> SimulatedGateway:
        self._num_gateways += 1
        gateway = SimulatedGateway(f"gateway-{self._num_gateways}", self.config, self.network, self.store)
        self.gateways.append(gateway)
        for worker in self.workers.values():
            gateway.fleet.add_worker(worker.info.address, worker_id=worker.worker_id)
        return gateway

    async def restart_gateway(self, place: int) -> None:
        old = self.gateways[place]
        self.event_log.note("gateway lost", old.name)
        await old.kill()
        fresh = self._open_gateway()
        self.gateways.pop()
        self.gateways[place] = fresh
        await fresh.start()

    # -- workers -------------------------------------------------------------------------------------------------------

    async def drain(self, worker: SimulatedWorker) -> None:
        """Drains a worker as in a rollout: it ends, and its supervisor restarts it."""
        client = self._client(worker.info.address)
        try:
            await client.drain(exit=True)
        except BatonError as error:
            self.event_log.note("drain not confirmed", worker.worker_id, error=error.code)
        finally:
            await client.close()

    # -- the supervisor's interfaces -----------------------------------------------------------------------------------

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        worker_id, launched_s = plan.worker_id, self._loop.time()
        try:
            worker = self._make_worker(plan, incarnation)
        except Exception as error:  # the worker will never start: the simulation ends with this error
            self._loop.call_exception_handler({"message": f"{worker_id} cannot be made", "exception": error})
            raise
        self.num_made += 1
        try:
            yield Loading(share=0.0)
            await asyncio.sleep(self.config.load_s)
            info = worker.start()
            self.workers[worker_id] = worker
            self.event_log.note("worker serves", worker_id, incarnation=incarnation)
            yield Serving(info=info)
            await worker.ended
            if not worker.has_left:
                raise WorkerLost("its process ended")
        finally:
            self.workers.pop(worker_id, None)
            worker.kill()
            self.event_log.note("worker ended", worker_id, incarnation=incarnation)
            lived_s = self._loop.time() - launched_s
            self.served.append(
                WorkerLife(
                    worker_id=worker_id, role=plan.role, lived_s=lived_s, work=worker.device.work,
                    load=worker.engine.load(),
                )
            )  # fmt: skip

    async def release(self, worker_id: str) -> None: ...

    def _make_worker(self, plan: WorkerPlan, incarnation: int) -> SimulatedWorker:
        config = self.config
        return SimulatedWorker(
            config.spec_of(plan.role),
            worker_id=plan.worker_id,
            role=plan.role,
            incarnation=incarnation,
            network=self.network,
            lanes=self.lanes,
            skew_s=self._skews.random() * config.max_skew_s,
            gaps=self.gaps,
            withholds=self._untroubled and config.num_gateways == 1,
            seed=config.seed,
        )

    async def starting(self, worker_id: str, successor: Successor) -> None:
        for gateway in self.gateways:
            gateway.fleet.starting(worker_id, successor)

    async def announce(self, worker_id: str, address: str) -> None:
        for gateway in self.gateways:
            gateway.fleet.add_worker(address, worker_id=worker_id)

    async def withdraw(self, worker_id: str) -> None:
        for gateway in self.gateways:
            await gateway.fleet.remove_worker(worker_id)

    async def check_health(self, address: str) -> None:
        client = self._client(address)
        try:
            health = await client.health()
        finally:
            await client.close()
        if not health.healthy:
            stuck = [worker for worker in self.workers.values() if worker.info.address == address]
            self.stuck += [f"{worker.worker_id}: {health.reason}" for worker in stuck if not worker.held_up]
            raise WorkerLost(health.reason)

    def _client(self, address: str) -> WorkerClient:
        return WorkerClient(
            address,
            connect_timeout_s=HEALTH_TIMEOUT_S,
            control_timeout_s=HEALTH_TIMEOUT_S,
            open_channel=self.network.open_channel,
        )


class _Calls(WorkerCalls):
    def __init__(self, deployment: SimulatedDeployment) -> None:
        super().__init__(deployment.network.open_channel)
        self._deployment = deployment

    async def check_health(self, address: str) -> None:
        await self._deployment.check_health(address)
