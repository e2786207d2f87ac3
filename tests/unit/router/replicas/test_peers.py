"""Several gateway processes behind one port answer as one, whichever of them is asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from uvicorn.server import ServerState

from router.app import create_app
from router.dispatch.chooser import routing_of
from router.dispatch.dispatcher import Dispatcher
from router.fleet.metrics import FleetCollector
from router.history.history import History, HistoryPeriod
from router.metrics import GAP_SECONDS, SECONDS
from router.policies.registry import policy_of
from router.replicas.peers import PeerProcesses, ProcessStatus, SingleProcessApp, http_socket
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import ask
from tests.unit.router.scripted import make_gateway


@asynccontextmanager
async def process(cluster: Cluster, processes: PeerProcesses, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that its siblings reach over its socket, and clients as if they had come through the port."""
    assert processes.folder is not None
    routing = routing_of(cluster.config)
    generate = Dispatcher(fleet=cluster.fleet, policy=policy_of(cluster.config), config=cluster.config, routing=routing)
    loop = asyncio.get_running_loop()
    gateway = make_gateway(
        generate,
        fleet=cluster.fleet,
        routing=routing,
        processes=processes,
        wall_clock=lambda: 1_700_000_000 + loop.time(),  # goes on: processes are asked one after the other
        **changes,
    )
    gateway.metrics.registry.register(FleetCollector(cluster.fleet))
    app = create_app(gateway)
    config = uvicorn.Config(SingleProcessApp(app), lifespan="off", http="httptools", log_config=None)
    config.load()
    state, protocol = ServerState(), cast("Any", config.http_protocol_class)
    server = await loop.create_unix_server(
        lambda: protocol(config=config, server_state=state, app_state={}),
        http_socket(processes.folder, processes.number),
    )
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield client
    finally:
        await processes.close()
        server.close()
        await server.wait_closed()


async def test_any_process_tells_of_all_of_them(make: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make(shadow_policy="least_loaded")
    await cluster.add("c0")
    all_three = [PeerProcesses(folder=tmp_path, number=number, count=3) for number in range(3)]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(process(cluster, one)) for one in all_three[:2]]
        assert (await first.get("/ready")).status_code == 503
        for one in all_three:
            one.settled = True
            one.statuses = (ProcessStatus(number=2, pid=0, state="waiting", reason="killed"),)  # and answers nobody
        told = (await first.get("/ready")).json()
        assert (told["ready"], told["degraded"]) == (True, "gateway process 2 is waiting (killed)")

        for client, name in ((first, "one"), (second, "two"), (second, "same"), (first, "same")):
            assert (await ask(client, name)).status_code == 200
        for client in (first, second):
            for name, count in (("one", 1), ("two", 1), ("same", 2)):
                assert len((await client.get(f"/admin/requests/{name}")).json()["jobs"]) == count
                assert len((await client.get(f"/admin/requests/{name}/cache")).json()["jobs"]) == count
            assert (await client.get("/admin/requests/three")).status_code == 404
            for odd in ("%2E", "%2E%2E", "x%00", "%3Flimit=1", "%23", "%FF", "%20"):
                assert (await client.get(f"/admin/requests/{odd}")).status_code == 404, odd
            latest = (await client.get("/admin/requests?limit=3")).json()["requests"]
            assert [one["request_id"] for one in latest] == ["same", "same", "two"]
            assert (await client.get("/admin/shadows")).json()["shadows"][0]["decisions"] == 4
            told = (await client.get("/admin/status")).json()
            assert told["processes"][0]["state"] == "waiting"

            page = (await client.get("/metrics")).text
            counted = r'^baton_requests_total{endpoint="completions",model="",outcome="ok",process="(.)"} (\S+)$'
            assert re.findall(counted, page, re.MULTILINE) == [("0", "2.0"), ("1", "2.0")]
            heard = r'^baton_pool_kv_blocks{pool="colocated"} (\S+)$'
            assert len(re.findall(heard, page, re.MULTILINE)) == 1, "what workers say is told once"


async def test_the_last_hour_is_that_of_all_processes(make: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster, quick, slow = make(), History(), History()
    for history, bucket, ends in ((quick, 0, (10, 20)), (slow, 5, (20,))):
        ttft = [9 if place == bucket else 0 for place in range(len(SECONDS) + 1)]
        for at in ends:
            history.add(
                HistoryPeriod(
                    at=at, ttft=ttft, gaps=[0] * (len(GAP_SECONDS) + 1), requests=3.0, output_tokens=7.0,
                    prompt_tokens=1.0, prompt=10, cached=bucket, waiting=2, in_flight=1, worker_waiting=4,
                    kv={"decode": (1, 4)}, ready={"decode": 1},
                )
            )  # fmt: skip
    both = [PeerProcesses(folder=tmp_path, number=number, count=2) for number in range(2)]
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(process(cluster, both[0], history=quick))
        second = await stack.enter_async_context(process(cluster, both[1], history=slow))
        told = (await first.get("/admin/history")).json()
        assert (await second.get("/admin/history")).json() == told
        alone, together = told["points"]
        assert (alone["at"], alone["requests_per_s"], alone["hit_rate"]) == (10, 3.0, 0.0)
        assert (together["at"], together["output_tokens_per_s"], together["hit_rate"]) == (20, 14.0, 0.25)
        assert together["ttft_p50_s"] == SECONDS[0]
        assert SECONDS[4] < together["ttft_p95_s"] < SECONDS[5]
        assert (together["waiting"], together["worker_waiting"], together["kv_use"]) == (4, 4, {"decode": 0.25})
        assert (await second.get("/admin/history?since=10")).json()["points"] == [together]
        assert (await first.get("/admin/history?since=soon")).status_code == 400
