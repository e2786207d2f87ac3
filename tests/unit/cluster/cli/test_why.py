"""`baton why` against a live gateway: what a person reads."""

from __future__ import annotations

import asyncio
import io
import json
import re

import pytest
from rich.console import Console

from cluster.cli.why import explanation, recent_table, why
from kvtransfer.hashing import chain_hashes
from protos.errors import Unavailable, UnknownRequest
from protos.values import BlockRemoved, BlockStored, Tier
from tests.unit.router.fake_cluster import PROMPT, Cluster
from tests.unit.router.fake_worker import BLOCK_SIZE
from tests.unit.router.operating import ask, operating


async def test_tokens_that_only_a_host_has_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, hashes = Cluster(policy="slo"), chain_hashes(PROMPT, BLOCK_SIZE)
    try:
        await cluster.add("c0")
        cluster["c0"].tell(
            BlockStored(hashes=hashes[:3]),
            BlockStored(hashes=hashes[1:3], parent=hashes[0], tier=Tier.HOST),
            BlockRemoved(hashes=hashes[1:3]),
        )
        await cluster.until(lambda: cluster.fleet.status()[0].num_host_blocks == 2)
        async with operating(cluster) as (client, _):
            await ask(client, "mine")
            url = str(client.base_url)
            await asyncio.to_thread(why, "mine", url)
            told = capsys.readouterr().out
            await asyncio.to_thread(why, "mine", url, True)
            [job] = json.loads(capsys.readouterr().out)["jobs"]
    finally:
        await cluster.close()
    assert f"{3 * BLOCK_SIZE} ({2 * BLOCK_SIZE} host)" in told
    assert "load" in told
    assert f"host_tokens {2 * BLOCK_SIZE}" in told
    assert job["choices"][0]["expected"]["num_host_tokens"] == 2 * BLOCK_SIZE


async def test_a_request_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(policy="slo", shadow_policy="round_robin")
    try:
        await cluster.add("p0", "d0", "d1")
        async with operating(cluster) as (client, _):
            client.headers["x-session-id"] = "talk-7"
            await ask(client, "mine")
            url = str(client.base_url)
            await asyncio.to_thread(why, "mine", url)
            told = capsys.readouterr().out
            await asyncio.to_thread(why, "", url)
            listed = capsys.readouterr().out
            await asyncio.to_thread(why, "mine", url, True)
            [job] = json.loads(capsys.readouterr().out)["jobs"]
            with pytest.raises(UnknownRequest, match="no request 'other'"):
                await asyncio.to_thread(why, "other", url)
    finally:
        await cluster.close()
    assert "mine" in listed
    assert job["session"] == "talk-7"
    assert "talk-7" in told
    assert f"p0 prefills, {job['decode']} decodes" in told
    for word in (
        "compute",
        "transfer",
        "late_ttft",
        "KV arrived",
        "last token",
        "never stored",
        "round_robin would have",
    ):
        assert word in told
    assert told.count("d0") >= 1
    assert told.count("d1") >= 1
    [score] = [score for score in job["choices"][0]["scores"] if score["worker_id"] == "p0"]
    [row] = re.findall(r"^p0 +([\d.,]+) +prefill ", told, re.MULTILINE)
    assert float(row.replace(",", "")) == pytest.approx(1000 * score["total"], rel=0.01), "the total is first, in ms"
    assert "(ms)" in told
    both = r"[\d.,]+ m?s expected, [\d.,]+ m?s measured"
    assert re.search(rf"^  decision to first token {both}\n  between tokens {both}$", told, re.MULTILINE)
    assert re.search(r"; TTFT [\d.,]+ m?s, from its arrival at the gateway$", told, re.MULTILINE)
    terms = {
        name for score in job["choices"][0]["scores"] for name in score["terms"] if not name.startswith("prefill by")
    }
    assert all(re.search(rf"^  {term}: ", told, re.MULTILINE) for term in terms), "every cost is explained"


async def test_a_vector_is_computed_and_nothing_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(policy="slo")
    try:
        await cluster.add("p0", "d0")
        async with operating(cluster) as (client, _):
            body, named = {"model": "tiny", "input": PROMPT}, {"x-baton-request-id": "mine"}
            assert (await client.post("/v1/embeddings", json=body, headers=named)).status_code == 200
            for request in ("mine", ""):
                await asyncio.to_thread(why, request, str(client.base_url))
    finally:
        await cluster.close()
    explained, listed = capsys.readouterr().out.split("Requests")
    assert "p0 answers, no worker decodes" in explained
    assert "a vector, no tokens written; computed in" in explained
    assert "vector computed" in explained
    for word in ("d0", "TTFT", "between tokens", "to first token", "length"):
        assert not re.search(rf"\b{word}\b", explained), explained  # a request's id may have d0 within
    assert re.search(r"^mine +done +\d+ +0 +- +[\d.,]+ m?s +- +p0 +- *$", listed, re.MULTILINE), listed


async def test_costs_that_are_no_time_have_no_unit(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(policy="least_loaded")
    try:
        await cluster.add("d0")
        async with operating(cluster) as (client, _):
            await ask(client, "mine")
            await asyncio.to_thread(why, "mine", str(client.base_url))
    finally:
        await cluster.close()
    told = capsys.readouterr().out
    assert re.search(r"^worker +total +role +cached ", told, re.MULTILINE)
    assert "(ms)" not in told


async def test_nothing_is_called_measured_that_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(policy="round_robin")
    try:
        await cluster.add("d0", "d1")
        for worker_id in ("d0", "d1"):
            cluster[worker_id].pause_after = 2
        async with operating(cluster) as (client, _):
            asking = asyncio.create_task(ask(client, "mine"))
            recent = cluster.router.routing.records.recent
            while not any(record.timestamps.num_tokens == 2 for record in recent(1)):  # noqa: ASYNC110 - it notifies nobody
                await asyncio.sleep(0)
            cluster["d1"].pause_after = None
            await cluster["d0"].die()
            await asking
            await asyncio.to_thread(why, "mine", str(client.base_url))
            told = "".join(capsys.readouterr().out.splitlines())
    finally:
        await cluster.close()
    first, second = (told.partition("round_robin: ")[2].partition("round_robin: ")[place] for place in (0, 2))
    assert "d0 alone" in first
    assert "measured" not in first.partition("worker ")[0]
    assert "d1 alone" in second
    assert re.search(r"first token [\d.]+ m?s expected  between", second), "the first token was before it"
    assert re.search(r"between tokens [\d.]+ m?s expected, [\d.]+ m?s measured", second)


def test_a_narrow_terminal_breaks_no_name() -> None:
    name = "req-0123456789abcdef0123456789abcdef"
    request = {
        "request_id": name, "state": "", "outcome": "length", "prompt_tokens": 12345, "cached_tokens": 1024,
        "output_tokens": 256, "drafted_tokens": 300, "accepted_drafts": 180, "paused_drafts": [],
        "ttft_s": 0.1234, "tpot_s": 0.0123, "prefill": "prefill-0", "decode": "decode-10",
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=80).print(recent_table([request]))
    assert f"{name}  length  123.4 ms  prefill-0  decode-10" in " ".join(out.getvalue().split("\n")), out.getvalue()
    assert "--json, also shows prompt" in out.getvalue()


def test_an_unreachable_gateway_is_reported() -> None:
    with pytest.raises(Unavailable):
        why("mine", "http://127.0.0.1:9")


def test_drafts_of_an_answer_are_shown() -> None:
    job = {
        "request_id": "r", "job": "r-0", "state": "", "outcome": "length", "prompt_tokens": 5, "cached_tokens": 0,
        "output_tokens": 40, "drafted_tokens": 60, "accepted_drafts": 25, "ttft_s": None, "message": "", "choices": [],
        "timeline": [], "paused_drafts": ["eagle"],
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=160).print(explanation({"jobs": [job], "cache": []}))
    assert "40 tokens written, 25 of them accepted of 60 drafted" in out.getvalue()
    assert "drafts of eagle were paused, since they did not pay" in " ".join(out.getvalue().split())
