"""An operator's questions about requests: over HTTP, with the real protocol of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, repeat

from prometheus_client import CollectorRegistry, generate_latest

from protos.values import SamplingParams
from router.admin.requests import ahead_s
from router.jobs import Job
from router.router_metrics import Scraped, prediction_metrics
from router.traces.request_trace import MAX_CHUNKS, RequestTraces
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import ask, operating


async def test_a_request_tells_its_candidates_costs_choice_and_story(make: Callable[..., Cluster]) -> None:
    cluster = make(policy="slo")
    await cluster.add("p0", "p1", "d0")
    async with operating(cluster) as (client, _):
        answer = (await ask(client, "mine")).json()
        [job] = (await client.get("/admin/requests/mine")).json()["jobs"]
        by_answer = (await client.get(f"/admin/requests/{answer['id']}")).json()
    assert by_answer["jobs"][0]["choices"] == job["choices"]
    assert (job["state"], job["outcome"], job["output_tokens"]) == ("ended", "length", 6)
    [choice] = job["choices"]
    assert {candidate["worker_id"] for candidate in choice["candidates"]} == {"p0", "p1", "d0"}
    assert (choice["policy"], choice["decode"], choice["prefill"][0]) == ("slo", "d0", "p")
    reading = next(score for score in choice["scores"] if score["worker_id"] == choice["prefill"])
    assert reading["total"] == sum(reading["terms"].values())
    assert {"overhead", "queue", "compute"} <= reading["terms"].keys()
    assert choice["measured"]["ttft_s"] - choice["expected"]["ttft_s"] == choice["measured"]["ttft_error_s"]
    story = [event["what"] for event in job["timeline"]]
    assert story == [
        "arrived", "received", "admitted", "decided", "blocks reserved", "prompt sent", "prompt computed",
        "first token", "KV arrived", "last token", "ended",
    ]  # fmt: skip
    assert [event["at_s"] for event in job["timeline"]] == sorted(event["at_s"] for event in job["timeline"])
    arrived, received, *_ = job["timeline"]
    assert arrived["at_s"] == 0.0 < received["at_s"] < job["ttft_s"], "reading the prompt is part of the story"


async def test_a_failure_and_the_next_attempt_are_in_the_story(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    for worker in ("c0", "c1"):
        cluster[worker].pause_after = 2
    async with operating(cluster) as (client, _):
        asking = asyncio.create_task(ask(client, "again"))
        await cluster["c0"].until(lambda: bool(cluster["c0"].submitted))
        await cluster["c0"].die()
        cluster["c1"].go()
        assert (await asking).status_code == 200
        [job] = (await client.get("/admin/requests/again")).json()["jobs"]
    assert [choice["decode"] for choice in job["choices"]] == ["c0", "c1"]
    failed = next(event for event in job["timeline"] if event["what"] == "attempt failed")
    assert failed["code"] == "worker_lost"
    assert job["failures"] == 1


async def test_who_wants_to_see_progress_gets_the_chunks_in_the_story(cluster: Cluster) -> None:
    async with operating(cluster) as (client, _):
        options = {"stream": True, "stream_options": {"include_prefill_progress": True}}
        assert (await ask(client, "seen", **options)).status_code == 200
        assert (await ask(client, "unseen")).status_code == 200
        for name, chunks in (("seen", [30]), ("unseen", [])):
            [job] = (await client.get(f"/admin/requests/{name}")).json()["jobs"]
            told = [event["tokens"] for event in job["timeline"] if event["what"] == "part of the prompt computed"]
            assert told == chunks


async def test_a_long_prompt_pushes_nothing_else_out_of_the_story() -> None:
    job = Job(request_id="a-0", group_id="a", prompt_ids=(1, 2), sampling=SamplingParams())
    [record] = RequestTraces().open([job])
    for number in range(1000):
        record.computed(number, 0.0)
    assert (record.events[0].what, len(record.events)) == ("received", 1 + MAX_CHUNKS)


async def test_recent_requests_are_listed_newest_first(cluster: Cluster) -> None:
    async with operating(cluster) as (client, _):
        for name in ("one", "two"):
            await ask(client, name)
        listed = (await client.get("/admin/requests", params={"limit": 1})).json()["requests"]
        wrong = await client.get("/admin/requests", params={"limit": "all"})
        endless = await client.get("/admin/requests", params={"limit": "1" * 4301})
        unknown = await client.get("/admin/requests/three")
    assert [entry["request_id"] for entry in listed] == ["two"]
    assert (wrong.status_code, endless.status_code) == (400, 400)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "request_not_found"


async def test_a_client_that_left_is_told(cluster: Cluster) -> None:
    cluster["d0"].pause_after = 1
    async with operating(cluster) as (client, routing):
        asking = asyncio.create_task(ask(client, "left"))
        await cluster["d0"].until(lambda: bool(cluster["d0"].running))
        asking.cancel()
        await cluster["d0"].until(lambda: bool(cluster["d0"].aborted))
    [record] = routing.records.find("left")
    assert (record.outcome, record.message) == ("cancelled", "the client went away")


async def test_a_miss_is_explained(cluster: Cluster) -> None:
    async with operating(cluster) as (client, _):
        await ask(client, "first")
        [job] = (await client.get("/admin/requests/first/cache")).json()["jobs"]
    assert job["miss"]["num_found"] == 0
    assert job["miss"]["findings"][0]["reason"] == "never stored"


async def test_a_shadow_scores_and_does_not_act(make: Callable[..., Cluster]) -> None:
    cluster = make(policy="least_loaded", shadow_policy="round_robin,slo")
    await cluster.add("c0")
    async with operating(cluster) as (client, routing):
        await ask(client, "mine")
        [job] = (await client.get("/admin/requests/mine")).json()["jobs"]
        shadows = (await client.get("/admin/shadows")).json()["shadows"]
    assert [shadow["policy"] for shadow in job["choices"][0]["shadows"]] == ["round_robin", "slo"]
    assert [(shadow["policy"], shadow["decisions"], shadow["agreement"]) for shadow in shadows] == [
        ("round_robin", 1, 1.0),
        ("slo", 1, 1.0),
    ]
    assert len(cluster["c0"].submitted) == 1
    registry = CollectorRegistry()
    registry.register(Scraped(lambda: prediction_metrics(cluster.fleet.offers.predictor, routing.shadows)))
    told = generate_latest(registry).decode()
    assert 'baton_shadow_decisions_total{policy="round_robin"} 1.0' in told
    assert 'baton_predictions_total{what="ttft",worker="c0"} 1.0' in told
    assert 'baton_prediction_error_seconds{what="tpot",worker="c0"}' in told


def test_an_interruption_between_clock_readings_is_no_offset() -> None:
    own = chain([1.0, 3.0, 3.0, 3.0], repeat(3.0))  # interrupted for two seconds between the first two
    assert ahead_s(lambda: 103.0, lambda: next(own)) == 100.0


def test_the_offset_is_the_difference_of_two_running_clocks() -> None:
    ticks: Iterator[int] = iter(range(100))
    assert abs(ahead_s(lambda: 50.0 + next(ticks), lambda: float(next(ticks))) - 50.0) < 1.0
