"""Requests for an adapter go to workers that have it, whatever else speaks for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from protos.errors import AdapterNotLoaded, BadCheckpoint, BatonError, InvalidRequest, NotFound, NoWorkers
from protos.values import Adapter, AdapterList, StepMessage
from protos.wire import error_info
from router.fleet.fleet_adapters import FleetAdapters
from router.routing.registry import NAMES
from tests.unit.router.dispatch.test_migration import NUM_TOKENS, Client, drain, go
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import expected_tokens


def adapter(name: str, adapter_id: str = "") -> Adapter:
    return Adapter(adapter_id=adapter_id or f"id of {name}", name=name, path=f"/{name}", rank=8, num_bytes=1)


@pytest.mark.parametrize("policy", NAMES)
async def test_only_workers_with_the_adapter_get_its_requests(make: Callable[..., Cluster], policy: str) -> None:
    cluster = make(policy=policy, local_prefill_tokens=0)
    await cluster.add("p0", "p1", "d0", "d1")
    for worker in ("p1", "d1"):
        announce(cluster, worker, adapter("sql"))
    await cluster.until(lambda: "sql" in cluster.fleet.adapters())
    adapted = replace(job("adapted"), adapter="id of sql")
    for number in range(4):
        request = replace(adapted, request_id=f"adapted-{number}")
        assert tokens(await collect(cluster, request)) == expected_tokens(PROMPT, 8)
    assert {request.adapter for worker in ("p1", "d1") for request in cluster[worker].submitted} == {"id of sql"}
    assert not cluster["p0"].submitted
    assert not cluster["d0"].submitted


async def test_a_request_without_its_adapter_waits_then_fails(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.05)
    await cluster.add("c0")
    with pytest.raises(NoWorkers):
        await collect(cluster, replace(job("adapted"), adapter="id of sql"))
    assert not cluster["c0"].submitted


async def test_most_connected_workers_decide_a_names_files(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1", "c2")
    announce(cluster, "c0", adapter("sql", "old"), adapter("chat"))
    announce(cluster, "c1", adapter("sql", "new"))
    announce(cluster, "c2", adapter("sql", "new"))
    await cluster.until(lambda: set(cluster.fleet.adapters()) == {"sql", "chat"})
    await cluster.until(lambda: cluster.fleet.adapters()["sql"].adapter_id == "new")
    announce(cluster, "c0")
    await cluster.until(lambda: set(cluster.fleet.adapters()) == {"sql"})
    for worker in ("c0", "c1", "c2"):
        await cluster[worker].die()
    assert set(cluster.fleet.adapters()) == {"sql"}, "requests wait for the workers that are about to be back"


async def test_an_order_reaches_every_worker_and_restarted_ones(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    report = await cluster.fleet.load_adapter("sql", "/adapters/sql")
    assert set(report.done) == {"c0", "c1"}
    await cluster.until(lambda: "sql" in cluster.fleet.adapters())
    await cluster["c0"].die()
    await cluster["c0"].restart()
    await cluster.until(lambda: "sql" in cluster["c0"].adapters)
    await cluster.fleet.unload_adapter("sql")
    await cluster.until(lambda: not cluster.fleet.adapters())
    with pytest.raises(NotFound, match="no adapter 'sql'"):
        await cluster.fleet.unload_adapter("sql")


async def two_with_sql(make: Callable[..., Cluster]) -> Cluster:
    """c0 and c1, which were ordered to load "sql"."""
    cluster = make()
    await cluster.add("c0", "c1")
    await cluster.fleet.load_adapter("sql", "/adapters/sql")
    await cluster.until(lambda: "sql" in cluster.fleet.adapters())
    return cluster


async def test_another_processs_order_is_kept_for_restarted_workers(
    make: Callable[..., Cluster],
) -> None:
    cluster = await two_with_sql(make)
    for worker in ("c0", "c1"):  # as another process's orders do
        cluster[worker].unload_adapter("sql")
        cluster[worker].load_adapter("chat", "/adapters/chat")
    await cluster.until(lambda: set(cluster.fleet.adapters()) == {"chat"})
    await cluster["c0"].die()
    cluster["c0"].adapters.clear()
    await cluster["c0"].restart()
    await cluster.until(lambda: "chat" in cluster["c0"].adapters)
    assert set(cluster["c0"].adapters) == {"chat"}


async def test_a_removed_adapter_is_not_given_to_returning_workers(
    make: Callable[..., Cluster],
) -> None:
    cluster = await two_with_sql(make)
    await cluster["c0"].die()
    cluster["c0"].adapters.clear()
    cluster["c1"].adapters.clear()
    await cluster.until(lambda: "lost" in [worker.state for worker in cluster.fleet.status()])
    with pytest.raises(NotFound, match="no adapter 'sql'"):
        await cluster.fleet.unload_adapter("sql")
    await cluster["c0"].restart()
    await cluster.fleet.load_adapter("chat", "/adapters/chat")
    await cluster.until(lambda: "chat" in cluster["c0"].adapters)
    assert "sql" not in cluster["c0"].adapters


async def test_a_failed_load_is_reported_and_a_common_fault_raised(
    make: Callable[..., Cluster],
) -> None:
    cluster = make()
    with pytest.raises(NoWorkers, match="no worker is connected"):
        await cluster.fleet.load_adapter("sql", "/adapters/sql")
    await cluster.add("c0", "c1")
    cluster["c1"].refuse = BadCheckpoint("/adapters/sql/adapter_config.json does not exist")
    report = await cluster.fleet.load_adapter("sql", "/adapters/sql")
    assert (set(report.done), report.failed) == ({"c0"}, {"c1": "/adapters/sql/adapter_config.json does not exist"})
    cluster["c0"].refuse = cluster["c1"].refuse
    with pytest.raises(InvalidRequest, match=r"c0: /adapters/sql/adapter_config\.json does not exist"):
        await cluster.fleet.load_adapter("more", "/adapters/more")


@pytest.mark.parametrize("fails", [False, True])
async def test_an_answer_goes_on_where_its_adapter_is(make: Callable[..., Cluster], fails: bool) -> None:
    """Whether its worker drains, and the sequence moves with its KV, or is lost."""
    cluster = make(max_queue_s=5.0)
    await cluster.add("c0", "c1", "c2")
    for worker in ("c1", "c2"):
        cluster[worker].load_adapter("sql", "/sql")
    await cluster.until(
        lambda: [cluster.fleet.lora.num_workers(one) for one in cluster.fleet.adapters().values()] == [2]
    )
    client = Client(cluster, adapter="id of /sql")
    first = await client.paused()
    assert first in ("c1", "c2")
    second = "c2" if first == "c1" else "c1"
    if fails:
        await cluster[first].die()
    else:
        drain(cluster, first)
        await client.until(lambda: bool(cluster[first].moved))
    go(cluster)
    assert await client.done() == expected_tokens(PROMPT, NUM_TOKENS)
    assert not cluster["c0"].submitted
    assert [request.adapter for request in cluster[second].submitted] == ["id of /sql"]


async def test_a_request_for_a_replaced_adapter_is_served_by_it(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=5.0)
    await cluster.add("c0")
    cluster["c0"].load_adapter("sql", "/old")
    await cluster.until(lambda: "sql" in cluster.fleet.adapters())
    cluster["c0"].load_adapter("sql", "/new")
    await cluster.until(lambda: cluster.fleet.adapters()["sql"].path == "/new")
    refusals = {f"late.{attempt}": error_info(AdapterNotLoaded("not yet")) for attempt in (1, 2, 3, 4)}
    cluster["c0"].failed |= refusals  # more than `max_attempts`
    late = replace(job("late"), adapter="id of /old")
    assert tokens(await collect(cluster, late)) == expected_tokens(PROMPT, 8)
    assert {request.adapter for request in cluster["c0"].submitted} == {"id of /old"}
    assert cluster.generate.num_resumed == 0
    assert len(cluster["c0"].submitted) == 5


class Host:
    """A worker whose load never ends, or ends at once with an error."""

    def __init__(self, error: BatonError | None = None) -> None:
        self.error, self.asked = error, asyncio.Event()

    async def load_adapter(self, name: str, path: str) -> Adapter:
        self.asked.set()
        if self.error is None:
            await asyncio.Event().wait()
            raise AssertionError
        raise self.error

    async def unload_adapter(self, name: str) -> None:
        raise AssertionError


async def test_one_worker_reads_an_adapter_before_the_others() -> None:
    """Its files may harm their reader."""
    hosts = {"w0": Host(BadCheckpoint("harmful")), "w1": Host(), "w2": Host()}
    loading = asyncio.create_task(FleetAdapters().load("sql", "/sql", hosts))
    await hosts["w1"].asked.wait()
    assert not hosts["w2"].asked.is_set()
    loading.cancel()
    await asyncio.wait([loading])
    assert not hosts["w2"].asked.is_set()


def announce(cluster: Cluster, worker: str, *adapters: Adapter) -> None:
    message = StepMessage(load=cluster[worker].load, adapters=AdapterList(adapters=adapters))
    for gateway in cluster[worker]._gateways:
        gateway.put_nowait(message)
