"""The ledger's sums are the tokens that clients received: random requests, clients that hang up, a worker that dies.

BATON_LEDGER_REQUESTS=1000 runs as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli.serve import DEMO
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos.tls import FaceTls, PeerTls
from router.observe.ledger.ledger_report import costs, sums
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.router_config import LedgerConfig, RouterConfig
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker, WorkerParts

pytestmark = pytest.mark.cluster

NUM_REQUESTS = int(os.environ.get("BATON_LEDGER_REQUESTS", "100"))
AT_ONCE = 16


@dataclass(slots=True)
class Received:
    """The tokens that clients have: `least` where a client hung up, `most` what these had asked for."""

    ok: int = 0
    prompt: int = 0
    output: int = 0
    hung_up: int = 0
    least: int = 0
    most: int = 0
    refused: int = 0


async def one_request(client: httpx.AsyncClient, rng: random.Random, received: Received, *, is_quiet: bool) -> None:
    body: dict[str, Any] = {
        "model": "demo", "prompt": [rng.randrange(3, 40) for _ in range(rng.randrange(1, 40))], "ignore_eos": True,
        "max_tokens": rng.randrange(1, 24), "n": rng.choice((1, 1, 1, 2, 3)), "temperature": rng.choice((0.0, 1.0)),
    }  # fmt: skip
    match rng.randrange(2 if is_quiet else 4):
        case 0:
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            _ended(received, reply.json()["usage"])
        case 1:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            reply = await client.post("/v1/completions", json=body | options)
            assert reply.text.endswith("data: [DONE]\n\n"), reply.text
            _ended(received, json.loads(reply.text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"])
        case 2:
            name = {"x-baton-request-id": f"again-{rng.randrange(2**40)}"}
            await _hang_up(client, body | {"max_tokens": 400}, rng.randrange(1, 5), received, name)
            reply = await client.post("/v1/completions", json=body, headers=name)  # the client tries again
            _ended(received, reply.json()["usage"])
        case _:
            reply = await client.post("/v1/completions", json=body | {"temperature": 9})
            assert reply.status_code == 400
            received.refused += 1


def _ended(received: Received, usage: dict[str, int]) -> None:
    received.ok += 1
    received.prompt += usage["prompt_tokens"]
    received.output += usage["completion_tokens"]


async def _hang_up(
    client: httpx.AsyncClient, body: dict[str, Any], num_events: int, received: Received, name: dict[str, str]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = body | {"stream": True, "stream_options": options}
    async with client.stream("POST", "/v1/completions", json=asked, headers=name) as response:
        usage = 0
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage, num_events = json.loads(line[6:])["usage"]["completion_tokens"], num_events - 1
            if not num_events:
                break
    received.hung_up += 1
    received.least += usage
    received.most += body["n"] * body["max_tokens"]


def named(worker_id: str) -> WorkerParts:
    parts = parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB))
    lane = replace(parts.info.lane, worker_id=worker_id)
    return replace(parts, info=replace(parts.info, worker_id=worker_id, lane=lane))


@pytest.mark.parametrize("is_quiet", [False, True], ids=["faults", "quiet"])
async def test_the_sums_equal_the_clients_tokens(tmp_path: Path, is_quiet: bool) -> None:
    config = RouterConfig(
        model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0, policy="round_robin",
        ledger=LedgerConfig(path=str(tmp_path / "ledger.db")),
    )  # fmt: skip
    workers = [Worker(named(f"w{number}")) for number in range(2)]
    server = GatewayServer(
        [ModelSettings(config=config)], socket.create_server(("127.0.0.1", 0)), tls=FaceTls(), peers=PeerTls()
    )
    rng, received, going = random.Random(24), Received(), asyncio.Semaphore(AT_ONCE)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        async with going:
            if number == NUM_REQUESTS // 2 and not is_quiet:
                await workers[1].stop()  # what it was answering continues at the other one
            await one_request(client, random.Random(rng.random()), received, is_quiet=is_quiet)

    try:
        await server.start()
        for number, worker in enumerate(workers):
            info = await worker.start("127.0.0.1", peers=PeerTls())
            server.fleet.add_worker(info.address, worker_id=f"w{number}")
        await server.ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
            await asyncio.gather(*(ask(client, number) for number in range(NUM_REQUESTS)))
    finally:
        await server.stop(5.0)  # which writes what is left
        for worker in workers:
            await worker.stop()
    with closing(ledger_database(tmp_path / "ledger.db")) as database:
        report = costs(database, PriceList(), since_s=0, until_s=2**40, by=())
        rows = {row.group["outcome"]: row for row in sums(database, since_s=0, until_s=2**40, by=("outcome",))}
    ok = rows["ok"]
    assert ok.requests == received.ok
    assert (ok.input_tokens + ok.cached_tokens, ok.output_tokens) == (received.prompt, received.output)
    if is_quiet:
        assert set(rows) == {"ok"}
        assert report.unrecorded_output_tokens == 0
        assert report.worker_prompt_tokens >= ok.input_tokens  # choices of one prompt may each compute it
        return
    assert set(rows) == {"ok", "cancelled"}
    cancelled = rows["cancelled"]
    assert cancelled.requests == received.hung_up
    assert cancelled.output_tokens >= received.least
    assert received.refused > 0
    assert report.worker_output_tokens >= ok.output_tokens + cancelled.output_tokens
    assert report.unrecorded_output_tokens <= received.most - cancelled.output_tokens, "they compute until they hear"
