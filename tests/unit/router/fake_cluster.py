"""A fleet of fake workers over real gRPC, met by a real dispatcher; and jobs to give it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx

from protos.event_loop import Changed
from protos.values import SamplingParams, StepMessage, WorkerRole
from router.build_router import Router, build_router
from router.dispatch.canary import by_one_worker
from router.dispatch.chooser import Routing
from router.dispatch.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.member import Member, WorkerState
from router.fleet.worker_client import WorkerClient
from router.jobs import Job, TokenDelta
from router.prefix.feed import Feed
from router.prefix.memory_index import MemoryPrefixIndex
from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy, RequestView
from router.routing.registry import policy_of
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.scripted import make_gateway, serving

ROLES = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE, "c": WorkerRole.COLOCATED}
PROMPT = tuple(range(100, 130))


class Relayed(Changed):
    """Another one notices each change as well."""

    def __init__(self, other: Changed) -> None:
        super().__init__()
        self._other = other

    def notify(self) -> None:
        super().notify()
        self._other.notify()


class Listening(Fleet):
    """Says also when a message has come, or a reason is known, that changes nothing for whoever decides."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.heard = Changed()
        self._changed = Relayed(self.heard)

    def _receive(self, member: Member, client: WorkerClient, step: StepMessage) -> None:
        super()._receive(member, client, step)
        self.heard.notify()

    def _enter(self, member: Member, state: WorkerState, reason: str = "") -> None:
        super()._enter(member, state, reason)
        self.heard.notify()


def router_config(model_path: Path, model_name: str, **settings: Any) -> RouterConfig:
    """`settings` of any part, by name."""
    config: Any = RouterConfig(model_path=model_path, model_name=model_name)
    for name, value in settings.items():
        for part in ("", "http", "text", "admission", "dispatch", "fleet"):
            owner = getattr(config, part) if part else config
            if hasattr(owner, name):
                changed = replace(owner, **{name: value})
                config = replace(config, **{part: changed}) if part else changed
                break
        else:
            raise TypeError(f"RouterConfig has no setting {name}")
    made: RouterConfig = config
    return made


def dispatcher_with(router: Router, policy: Policy) -> Dispatcher:
    """A dispatcher over the same fleet with `policy`, and its own records."""
    return Dispatcher(fleet=router.fleet, policy=policy, config=router.config, routing=Routing())


class Cluster:
    """`workers` by id, of a `kind`; the first letter of an id says the role."""

    def __init__(self, kind: type[FakeWorker] = FakeWorker, **settings: Any) -> None:
        self.kind = kind
        quick: dict[str, Any] = {"health_period_s": 60.0, "retry_pause_s": 0.01, "policy": "round_robin"}
        self.config = router_config(Path("m"), "toy", **quick | settings)
        self.workers: dict[str, FakeWorker] = {}
        self.router = build_router(self.config, feed=Feed(MemoryPrefixIndex(), gateway_id="g0"), open_fleet=Listening)
        self.fleet = cast("Listening", self.router.fleet)
        self.generate = self.router.dispatcher

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    def choose(self, worker_id: str, *, prefill: str | None = None) -> None:
        """From now on this worker does everything, or what `prefill` does not."""

        def decide(view: RequestView, candidates: CandidateTable) -> Decision:
            return Decision(policy="chosen", prefill=prefill, decode=worker_id)

        self.generate = dispatcher_with(self.router, decide)

    def alone(self) -> Dispatcher:
        """A router with one worker."""
        return dispatcher_with(self.router, by_one_worker(policy_of(self.config)))

    async def add(self, *worker_ids: str, wait: bool = True, **info: Any) -> None:
        for worker_id in worker_ids:
            worker = self.kind(worker_id, ROLES[worker_id[0]], self.workers, **info)
            await worker.start()
            self.fleet.add_worker(worker.address, worker_id=worker_id)
        if wait:
            for worker_id in worker_ids:
                await self.until_state(worker_id, WorkerState.READY)

    def state(self, worker_id: str) -> WorkerState:
        return next(status.state for status in self.fleet.status() if status.worker_id == worker_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once something that the fleet was told has made the condition true."""
        try:
            async with asyncio.timeout(60):
                while not condition():
                    await self.fleet.heard.wait()
        except TimeoutError:
            raise AssertionError(self.fleet.status()) from None

    async def until_state(self, worker_id: str, state: WorkerState) -> None:
        await self.until(lambda: self.state(worker_id) is state)

    async def close(self) -> None:
        await self.fleet.close()
        for worker in self.workers.values():
            await worker.die()


def job(request_id: str = "r", prompt_ids: tuple[int, ...] = PROMPT, max_tokens: int = 8, **sampling: Any) -> Job:
    return Job(
        request_id=request_id,
        group_id=request_id,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )


async def collect(cluster: Cluster, asked: Job) -> list[TokenDelta]:
    return [delta async for delta in cluster.generate(asked)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over HTTP, and its client."""
    async with (
        serving(make_gateway(cluster.generate, fleet=cluster.fleet)) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client,
    ):
        yield client
