"""The router below its faces, wired from its config: the same for a live gateway, the simulator and tests.

face ──Job──▶ Admission ──▶ Canary ──▶ Dispatcher ──▶ Fleet ──▶ workers
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from protos.wire import PROTOBUF, ChannelEncoding
from router.admission.admission import Admission
from router.admission.idle import IdleAdmission, IdleLimits
from router.dispatch.canary import Canary, by_one_worker
from router.dispatch.chooser import Routing, routing_of
from router.dispatch.dispatcher import Dispatcher
from router.fleet.channels import OpenChannel, open_channel
from router.fleet.fleet import Fleet
from router.jobs import Job, TokenDelta
from router.prefix.feed import Feed
from router.router_config import RouterConfig
from router.router_metrics import Scraped, admission_metrics, dispatch_metrics, fleet_metrics, prediction_metrics
from router.routing.decision import Policy
from router.routing.registry import policy_of
from router.traces.request_trace import RequestTraces


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Workers join `fleet`. `admission` is the `Generate` of the faces, `idle` that of batches. `close` it at the
    end."""

    config: RouterConfig
    fleet: Fleet
    routing: Routing
    dispatcher: Dispatcher
    canary: Canary
    admission: Admission
    idle: IdleAdmission
    idle_records: RequestTraces

    async def close(self) -> None:
        await self.canary.close()
        await self.fleet.close()


def build_router(
    config: RouterConfig,
    *,
    feed: Feed,
    open_channel: OpenChannel = open_channel,
    encoding: ChannelEncoding = PROTOBUF,
    registry: CollectorRegistry | None = None,
    open_fleet: Callable[..., Fleet] = Fleet,
) -> Router:
    """Runs on the event loop that calls it. With a `registry`, metrics are registered there, and
    evictions recorded for /admin. Raises Misconfigured for a policy that does not exist."""
    policy, routing = policy_of(config), routing_of(config)
    feed.observe = None if registry is None else routing.observe
    fleet = open_fleet(feed=feed, config=config, open_channel=open_channel, encoding=encoding)
    dispatcher = Dispatcher(fleet=fleet, policy=policy, config=config, routing=routing)
    alone = Dispatcher(fleet=fleet, policy=by_one_worker(policy), config=config, routing=Routing())
    canary = Canary(dispatcher, alone=alone, every=config.dispatch.canary_every)
    admission = Admission(canary, fleet=fleet.offers, config=config)
    idle_records = RequestTraces()
    idle = _idle(config, fleet, policy, admission, idle_records)
    if registry is not None:
        registry.register(Scraped(lambda: fleet_metrics(fleet)))
        registry.register(Scraped(lambda: prediction_metrics(fleet.offers.predictor, routing.shadows)))
        registry.register(Scraped(lambda: dispatch_metrics(dispatcher.moves, dispatcher.pulls, canary)))
        registry.register(Scraped(lambda: admission_metrics(admission)))
    return Router(
        config=config, fleet=fleet, routing=routing, dispatcher=dispatcher, canary=canary, admission=admission,
        idle=idle, idle_records=idle_records,
    )  # fmt: skip


def _idle(
    config: RouterConfig, fleet: Fleet, policy: Policy, admission: Admission, records: RequestTraces
) -> IdleAdmission:
    """Creates the admission of batches, with records of its own."""
    dispatcher = Dispatcher(fleet=fleet, policy=policy, config=config, routing=Routing(records=records))

    async def generate(job: Job) -> AsyncGenerator[TokenDelta, None]:
        try:
            async with aclosing(dispatcher(job)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            records.close([job], None)  # a suspended job's record keeps no prompt

    def decided(request_id: str) -> str:
        decisions = dispatcher.decision(request_id)
        return decisions[-1].decode if decisions else ""

    limits = IdleLimits(ttft_s=config.ttft_ms / 1000, tpot_s=config.tpot_ms / 1000, slowdown=config.batch.slowdown)
    return IdleAdmission(
        generate, fleet=fleet.offers, limits=limits, num_waiting=lambda: admission.num_waiting, decided=decided
    )
