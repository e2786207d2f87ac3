"""`baton roll` under streams: no error, every answer wholly of one model, and the new one's at the end."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.capacity.streams import whole_text
from tests.cluster.deployed import DEMO, PRECISE, Deployed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_STREAMS, NUM_TOKENS = 50, 24
CHANGED = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one changed weight, so that its KV and tokens differ."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {CHANGED: weights[CHANGED] * 0.2}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    started = Deployed("up", "--port", "0", *PRECISE, "--set", "router.local_prefill_tokens=0")
    try:
        yield started
    finally:
        started.kill()


class RolledStreams:
    """Clients that each send one stream after another."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.errors: list[str] = []
        self.texts: dict[int, set[str]] = {number: set() for number in range(NUM_STREAMS)}

    async def text(self, number: int) -> str:
        body = {
            "model": "demo", "prompt": f"def f{number}(first, second):\n", "max_tokens": NUM_TOKENS, "temperature": 0.0,
        }  # fmt: skip
        try:
            return await whole_text(self._client, body)
        except (ValueError, httpx.HTTPError) as error:
            self.errors.append(f"client {number}: {type(error).__name__}: {error}")
            return ""

    async def all(self) -> dict[int, str]:
        texts = await asyncio.gather(*(self.text(number) for number in range(NUM_STREAMS)))
        return dict(enumerate(texts))

    async def run(self, number: int, over: asyncio.Event) -> None:
        while not over.is_set():
            self.texts[number].add(await self.text(number))


async def rolled(client: httpx.AsyncClient, **order: Any) -> dict[str, Any]:
    """The change, when it is no longer under way."""
    response = await client.post("/admin/capacity", json={"who": "test", **order})
    assert response.status_code == 202, response.text
    number = response.json()["number"]
    while True:
        report = (await client.get("/admin/capacity")).json()
        change: dict[str, Any] = next(change for change in report["changes"] if change["number"] == number)
        if change["state"] != "under way":
            return change
        await asyncio.sleep(0.2)


async def test_a_roll_under_50_streams_drops_none_and_mixes_none(deployed: Deployed, other_model: Path) -> None:
    async with httpx.AsyncClient(base_url=deployed.url, timeout=300.0) as client:
        streams, over = RolledStreams(client), asyncio.Event()
        old = await streams.all()
        running = [asyncio.create_task(streams.run(number, over)) for number in range(NUM_STREAMS)]
        change = await rolled(client, kind="roll", model=str(other_model))
        over.set()
        await asyncio.gather(*running)
        new = await streams.all()
        assert (change["state"], streams.errors) == ("reached", []), deployed.log
        different = [number for number in old if old[number] != new[number]]
        assert len(different) > NUM_STREAMS / 2, "the models differ"
        mixed = {number: texts for number, texts in streams.texts.items() if not texts <= {old[number], new[number]}}
        assert not mixed, f"answers of neither model: {mixed}"
        both = [number for number in different if len(streams.texts[number]) == 2]
        assert both, "both served during the roll"
        status = deployed.status()
        assert {worker["info"]["model_path"] for worker in status["workers"]} == {str(other_model)}
        assert len({worker["info"]["revision"] for worker in status["workers"]}) == 1
        assert status["capacity"]["desired"]["counts"] == {"prefill": 1, "decode": 1}


async def test_a_roll_to_settings_that_cannot_be_goes_back_by_itself(deployed: Deployed) -> None:
    async with httpx.AsyncClient(base_url=deployed.url, timeout=300.0) as client:
        streams = RolledStreams(client)
        before = {worker["worker_id"]: worker["info"]["revision"] for worker in deployed.status()["workers"]}
        old = await streams.all()
        change = await rolled(client, kind="roll", settings={"worker.speculate": "model:/nowhere"})
        assert change["state"] == "failed", change
        assert "/nowhere" in change["reason"]
        refused = await client.post("/admin/capacity", json={"kind": "roll", "model": "/nowhere"})
        assert (refused.status_code, "/nowhere" in refused.text) == (400, True)
        assert (await streams.all(), streams.errors) == (old, [])
        assert {worker["worker_id"]: worker["info"]["revision"] for worker in deployed.status()["workers"]} == before


async def test_an_aborted_roll_goes_back_under_streams(deployed: Deployed) -> None:
    async with httpx.AsyncClient(base_url=deployed.url, timeout=300.0) as client:
        streams, over = RolledStreams(client), asyncio.Event()
        before = {worker["info"]["revision"] for worker in deployed.status()["workers"]}
        old = await streams.all()
        running = [asyncio.create_task(streams.run(number, over)) for number in range(NUM_STREAMS)]
        body = {"model": "demo", "prompt": "import", "max_tokens": 1900, "ignore_eos": True}

        async def long_answers() -> set[int]:  # they keep the roll from its end
            statuses: set[int] = set()
            while not over.is_set():
                statuses.add((await client.post("/v1/completions", json=body)).status_code)
            return statuses

        long = asyncio.create_task(long_answers())
        roll = asyncio.create_task(rolled(client, kind="roll", settings={"worker.prefill_chunk": 64}))
        while not any(
            ((report := (await client.get("/admin/capacity")).json())["rolling"] or {"newer": {}})["newer"].values()
        ):
            assert not roll.done(), report
        back = await rolled(client, kind="abort")
        over.set()
        await asyncio.gather(*running)
        assert await long == {200}
        gone = await roll
        assert (gone["state"], gone["reason"]) == ("replaced", f"test aborts it with change {back['number']}")
        assert (back["state"], streams.errors) == ("reached", []), deployed.log
        assert {number: {text} for number, text in old.items()} == streams.texts
        assert {worker["info"]["revision"] for worker in deployed.status()["workers"]} == before
        assert deployed.status()["capacity"]["desired"]["counts"] == {"prefill": 1, "decode": 1}
