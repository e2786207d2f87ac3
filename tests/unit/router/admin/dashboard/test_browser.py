"""The page at / in a real browser: what it draws, by keyboard, on a phone, light and dark."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from protos.values import WorkerRole
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.fleet_owner import (
    CapacityDecision,
    DesiredFleet,
    FleetChange,
    FleetReport,
    NoFleetOwner,
    OrderKind,
    PlannerReport,
)
from router.observe.history import NUM_PERIODS, PERIOD_S, History, quantile
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.ledger.rows import LedgerRow
from router.request_metrics import GAP_SECONDS, SECONDS
from tests.unit.router.admin.dashboard.browser import Browser, Tab
from tests.unit.router.fake_cluster import Cluster
from tests.unit.router.operating import ask, operating
from tests.unit.router.scripted import Scripted, ids_of, make_gateway, saying, serving
from tests.unit.router.test_app_models import model, two

ADMIN, ACME = "sk-baton-admin", "sk-baton-acme"
TENANTS = f'admin_keys = ["{hash_of(ADMIN)}"]\n[tenants.acme]\nkeys = ["{hash_of(ACME)}"]\n'
SCREENSHOTS = os.environ.get("BATON_SCREENSHOTS", "")
"""A folder to write the pictures of docs/ into."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium, in which the page would run")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def an_hour(until: int) -> History:
    """A load that swells and ebbs; in the middle a pause of ten minutes."""
    history = History()
    for number in range(NUM_PERIODS):
        swell = 1.1 + 0.8 * math.sin(number / 40) + 0.2 * math.sin(number * 1.7)
        load = 0 if 180 <= number < 240 else int(100 * swell)
        ttft = [0] * 4 + [load, load // 2, load * load // 400]
        gaps = [0] * 3 + [min(900, 9 * load), 3 * load, load * load // 300]
        history.add({
            "at": until - PERIOD_S * (NUM_PERIODS - 1 - number),
            "ttft_p50_s": quantile(SECONDS, ttft, 0.5), "ttft_p95_s": quantile(SECONDS, ttft, 0.95),
            "tpot_p50_s": quantile(GAP_SECONDS, gaps, 0.5), "tpot_p95_s": quantile(GAP_SECONDS, gaps, 0.95),
            "requests_per_s": load / 10, "output_tokens_per_s": 22.0 * load, "prompt_tokens_per_s": 31.0 * load,
            "hit_rate": 0.5 + 0.1 * swell if load else None, "waiting": max(0, load - 150), "in_flight": load // 3,
            "worker_waiting": max(0, load // 2 - 60), "ready": {"prefill": 1, "decode": 1},
            "kv_use": {"prefill": load // 3 / 100, "decode": (10 + load // 3) / 100},
        })  # fmt: skip
    return history


@asynccontextmanager
async def page(
    browser: Browser, cluster: Cluster, until: int, width: int = 1000
) -> AsyncIterator[tuple[Tab, httpx.AsyncClient]]:
    """The page of a cluster with an hour of history and one answered request."""
    async with operating(cluster, history=an_hour(until)) as (client, _):
        assert (await ask(client, "first")).status_code == 200
        async with browser.tab(str(client.base_url), width=width) as tab:
            await tab.until("document.querySelector('[data-request=first]')")
            await tab.until("document.querySelector('.chart')")
            yield tab, client
            assert tab.troubles == []


UNTIL = 1_795_500_000
LIKE_A_COLOUR = "getComputedStyle(document.querySelector('{}')).{}"


async def test_the_last_hour_is_drawn_and_read_by_keyboard(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL) as (tab, client):
        labels = await tab.js("[...document.querySelectorAll('.chart')].map((one) => one.getAttribute('aria-label'))")
        assert [label.partition(" over")[0] for label in labels] == [
            "TTFT", "TPOT", "Tokens/s", "Queue", "KV in use", "Prompt tokens cached"
        ]  # fmt: skip
        shown = (await client.get("/admin/history")).json()["points"][-1]
        assert f"Latest: p50 {1000 * shown['ttft_p50_s']:.1f} ms, p95 {1000 * shown['ttft_p95_s']:.1f} ms" in labels[0]
        lines = await tab.js("document.querySelector('[data-chart=TTFT] .line-0').getAttribute('d')")
        assert lines.count("M") == 2, "the pause is a gap, no line of zeros"
        assert lines.count("L") > 250

        await tab.js("document.querySelector('[data-chart=TTFT]').focus()")
        for key in ("ArrowLeft", "ArrowLeft"):
            await tab.press(key)
        said = "document.querySelector('[data-chart=TTFT] .said').innerText"
        before = (await client.get("/admin/history")).json()["points"][-2]
        assert f"p50 {1000 * before['ttft_p50_s']:.1f} ms" in await tab.js(said)
        await tab.press("Tab")
        assert await tab.js("document.activeElement.dataset.chart") == "TPOT"
        assert f"p50 {1000 * shown['ttft_p50_s']:.1f} ms" in await tab.js(said)
        await picture(tab, "page-history.png", "#charts")


ODYSSEY = [
    {"at_s": 0.0, "what": "received"}, {"at_s": 1.0, "what": "admitted"},
    {"at_s": 1.0, "what": "decided", "prefill": "p0", "decode": "d0"},
    {"at_s": 1.1, "what": "blocks reserved", "worker": "d0", "blocks": 7},
    {"at_s": 1.2, "what": "prompt sent", "worker": "p0"},
    {"at_s": 1.4, "what": "attempt failed", "code": "worker_lost", "message": "p0 has left"},
    {"at_s": 1.5, "what": "decided", "prefill": "p1", "decode": "d0"},
    {"at_s": 1.6, "what": "prompt sent", "worker": "p1"},
    {"at_s": 2.0, "what": "part of the prompt computed", "tokens": 512}, {"at_s": 2.5, "what": "prompt computed"},
    {"at_s": 2.5, "what": "first token"}, {"at_s": 2.7, "what": "KV arrived"},
    {"at_s": 4.0, "what": "moved with its KV", "source": "d0", "worker": "d1"}, {"at_s": 5.0, "what": "last token"},
    {"at_s": 5.1, "what": "ended"},
]  # fmt: skip


async def test_a_request_is_drawn_stage_by_stage(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL, width=400) as (tab, _):
        await tab.js("document.querySelector('[data-request=first]').focus()")
        await tab.press("Enter")
        await tab.until("document.querySelector('.stages')")
        rows = "[...document.querySelectorAll('.stages tbody tr')]"
        assert await tab.js(f"{rows}.map((one) => [0, 1].map((at) => one.cells[at].innerText))") == [
            ["receive", ""], ["queue", ""], ["route", ""], ["prefill", "p0"], ["transfer", "p0 to d0"], ["decode", "d0"]
        ]  # fmt: skip
        boxes = "[...document.querySelectorAll('.stages rect')].map((one) => one.getBoundingClientRect())"
        bars = await tab.js(f"{boxes}.map((one) => [one.left, one.right])")
        assert all(before[1] <= after[0] + 2 for before, after in itertools.pairwise(bars)), "one after the other"
        assert await tab.js("document.documentElement.scrollWidth") <= 400

        drawn = await tab.js(f"Timeline.rows({json.dumps(ODYSSEY)})")
        assert [(row["stage"], row["worker"], row["from_s"], row["to_s"]) for row in drawn["rows"]] == [
            ("queue", "", 0.0, 1.0), ("route", "", 1.0, 1.2), ("prefill", "p0", 1.2, 1.4), ("route", "", 1.4, 1.6),
            ("prefill", "p1", 1.6, 2.5), ("transfer", "p1 to d0", 2.5, 2.7), ("decode", "d0", 2.7, 4.0),
            ("decode", "d1", 4.0, 5.1),
        ]  # fmt: skip
        assert [row["failed"] for row in drawn["rows"]] == ["", "", "p0 has left", "", "", "", "", ""]
        marks = [words for row in drawn["rows"] for _, words in row["marks"]]
        assert marks == ["7 blocks reserved on d0", "512 prompt tokens computed", "first token", "moved from d0"]
        await tab.js(
            "document.body.append(Object.assign(document.createElement('div'), {id: 'odyssey'}));"
            f"document.getElementById('odyssey').append(...Timeline.stages({{timeline: {json.dumps(ODYSSEY)}}}))"
        )
        await picture(tab, "page-timeline.png", "#odyssey")


async def test_one_models_page_counts_its_own_requests(browser: Browser) -> None:
    big, small = model("big", "hello")[0], model("small", "the")[0]
    async with two(big, small) as client:
        for name in ("big", "small", "small"):
            asked = {"model": name, "prompt": "hello", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
        refused = await client.post("/v1/completions", json={"model": "small", "prompt": "hello", "max_tokens": 9999})
        assert refused.status_code == 400
        for path, ended in (("/", "1"), ("/models/small/", "3")):
            async with browser.tab(f"{client.base_url}{path}", width=760) as tab:
                await tab.until("document.querySelectorAll('#figures div').length === 6")
                figures = await tab.js("[...document.querySelectorAll('#figures div')].map((one) => one.innerText)")
                assert figures[-1] == f"requests ended\n{ended}"
                assert await tab.js("document.getElementById('errors-section').hidden") == (path == "/")


async def test_a_vector_is_done_and_not_cut(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL) as (tab, client):
        assert (await client.post("/v1/embeddings", json={"model": "tiny", "input": "hello"})).status_code == 200
        await tab.until("document.querySelectorAll('#requests tbody tr').length === 2")
        states = await tab.js(
            "[...document.querySelectorAll('#requests tbody td:nth-child(3)')].map((one) => one.innerText)"
        )
        assert sorted(states) == ["done", "length"]


async def test_it_fits_a_phone_and_is_dark_at_night(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL, width=400) as (tab, _):
        assert await tab.js("document.documentElement.scrollWidth") <= 400
        assert await tab.js("document.querySelector('.chart').getBoundingClientRect().width") > 330
        background = LIKE_A_COLOUR.format("body", "backgroundColor")
        light = await tab.js(background)
        await tab.look(width=400, dark=True)
        dark = await tab.js(background)
        assert sum(map(int, light[4:-1].split(","))) > 700
        assert sum(map(int, dark[4:-1].split(","))) < 100
        await picture(tab, "page-dark.png", "#charts", dark=True)


async def picture(tab: Tab, name: str, selector: str, *, dark: bool = False) -> None:
    """Renews a picture of docs/images, if SCREENSHOTS names that folder."""
    if SCREENSHOTS:
        await tab.look(width=760, dark=dark)
        await asyncio.to_thread((Path(SCREENSHOTS) / name).write_bytes, await tab.screenshot(selector))


async def write(tab: Tab, field: str, text: str) -> None:
    await tab.js(f"document.getElementById('{field}').focus()")
    await tab.call("Input.insertText", text=text)


ANSWERED = "[...document.querySelectorAll('.facts')].filter((one) => /written/.test(one.innerText)).length === {}"


async def test_two_answers_with_their_settings_say_who_served_them(browser: Browser, cluster: Cluster) -> None:
    letters = [ids_of(letter)[0] for letter in "hello"]
    for worker in cluster.workers.values():
        worker.token = lambda request, index: letters[index % 5]  # type: ignore[method-assign]
    async with page(browser, cluster, UNTIL) as (tab, _):
        await write(tab, "play-text", "Greet me")
        await tab.js("document.getElementById('play-twice').click()")
        for column, max_tokens in (("A", 5), ("B", 3)):
            await tab.js(f"document.getElementById('play-{column}-max_tokens').value = {max_tokens}")
        await tab.js("document.getElementById('play-text').focus()")
        await tab.press("Enter", ctrl=True)
        await tab.until(ANSWERED.format(2))
        await tab.until("document.querySelectorAll('.facts button').length === 2")
        answers = await tab.js("[...document.querySelectorAll('.tokens')].map((one) => one.innerText)")
        assert answers == ["hello", "hel"]
        facts = await tab.text(".facts")
        assert "length: first token after " in facts
        assert re.search(r"5 tokens written\np0 prefilled, d0 decoded; 0 of \d+ prompt tokens from p0's cache", facts)

        await tab.js("document.querySelector('.tokens').focus()")
        await tab.press("ArrowRight")
        await tab.press("ArrowRight")
        share = round(100 * math.exp(-letters[1] / 1024))
        assert (await tab.text(".odds")).startswith(f'"e" {share} %')
        await picture(tab, "page-playground.png", "#playground")

        await write(tab, "play-text", "And again")
        await tab.press("Enter", ctrl=True)
        await tab.until(ANSWERED.format(4))
        asked = [
            sequence.prompt_ids
            for name in ("p0", "d0")
            for sequence in cluster[name].submitted
            if not sequence.output_ids
        ]
        assert len({len(prompt) for prompt in asked}) > 2, "the chats go on after their first answers"


async def test_an_adapter_answers_beside_its_model(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL) as (tab, client):
        loaded = await client.post("/admin/adapters", json={"name": "polite", "path": "/adapters/polite"})
        assert loaded.status_code == 200, loaded.text
        await tab.js("document.getElementById('play-twice').click()")
        await tab.js("document.getElementById('play-B-model').focus()")
        await tab.until("document.querySelectorAll('#play-models option').length === 2")
        names = await tab.js("[...document.querySelectorAll('#play-models option')].map((one) => one.value)")
        assert names == ["tiny", "polite"]
        await write(tab, "play-B-model", "polite")
        await write(tab, "play-text", "Greet me")
        await tab.js("document.getElementById('play-send').click()")
        await tab.until(ANSWERED.format(2))
        told = await tab.js(
            "[...document.querySelectorAll('.facts')].map((one) => one.innerText.startsWith('polite. '))"
        )
        assert told == [False, True]
        await tab.until("!document.getElementById('adapters-section').hidden")
        assert "polite\t8\t1 B\tp0, d0" in (await tab.text("#adapters tbody"))


async def test_a_users_key_is_enough_to_chat(browser: Browser, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    generate = Scripted(saying('{"a": 1}'))
    gateway = make_gateway(generate, access=AccessControl(tmp_path / "tenants.toml"))
    async with serving(gateway) as url, browser.tab(url, width=400) as tab:
        await tab.until("!document.getElementById('door').hidden")
        await write(tab, "play-text", "hi")
        await tab.js("document.getElementById('play-send').click()")
        await tab.until("document.querySelector('.bad.facts')")
        assert "key" in await tab.text(".bad.facts")
        await write(tab, "play-key", ACME)
        await tab.js("document.querySelector('.play details').open = true")
        await write(tab, "play-schema", '{"type": "object')
        await tab.js("document.getElementById('play-send').click()")
        await tab.until("!document.querySelector('.play .bad').hidden")
        assert (await tab.text(".play .bad")).startswith("Schema: ")
        await write(tab, "play-schema", '"}')
        await tab.js("document.getElementById('play-schema').value = '{\"type\": \"object\"}'")
        await tab.js("document.getElementById('play-send').click()")
        await tab.until(ANSWERED.format(1))
        assert await tab.js("[...document.querySelectorAll('.tokens')].at(-1).innerText") == '{"a": 1}'
        await tab.until("/request \\S{8}/.test([...document.querySelectorAll('.facts')].at(-1).innerText)")
        assert generate.jobs[-1].sampling.grammar
        assert await tab.js("sessionStorage.getItem('baton-user-key')") == ACME
        assert await tab.js("document.documentElement.scrollWidth") <= 400


WORKERS = [
    {"worker_id": name, "state": "ready", "info": {"role": "prefill" if name[0] == "p" else "decode"}}
    for name in ("p0", "p1", "d0", "d1", "d2")
]
LANE = {"transport": "shared memory", "state": "open", "num_bytes": 10**9, "busy_s": 0.5, "idle_s": 1.0, "reason": ""}
LANES = [
    LANE | {"worker_id": "p0", "peer": "d0#1"}, LANE | {"worker_id": "d0", "peer": "p0#1", "num_bytes": 10},
    LANE | {"worker_id": "p0", "peer": "d1#1", "num_bytes": 10**8}, LANE | {"worker_id": "p1", "peer": "d1#1"},
    LANE | {"worker_id": "d1", "peer": "d2#1", "num_bytes": 0, "busy_s": 0},
    LANE | {"worker_id": "p1", "peer": "d2#1", "state": "stuck", "reason": "no progress for 5 s"},
    LANE | {"worker_id": "d2", "peer": "p1#1", "num_bytes": 10**10},
]  # fmt: skip


async def test_lanes_are_a_map_that_can_be_read_by_keyboard(browser: Browser, cluster: Cluster) -> None:
    async with page(browser, cluster, UNTIL, width=400) as (tab, _):
        await tab.js(
            "document.body.append(Object.assign(document.createElement('div'), {id: 'drawn'}));"
            f"document.getElementById('drawn').append(...LaneMap.map({json.dumps(WORKERS)}, {json.dumps(LANES)}))"
        )
        lanes = "[...document.querySelectorAll('#drawn .lane')]"
        said = await tab.js(f"{lanes}.map((one) => one.getAttribute('aria-label'))")
        assert said == [
            "d0 to p0 over shared memory: 1.0 GB moved, 2.0 GB/s",
            "d1 to p0 over shared memory: 100.0 MB moved, 200.0 MB/s",
            "d1 to p1 over shared memory: 1.0 GB moved, 2.0 GB/s",
            "d1 to d2 over shared memory: 0 B moved, not used yet",
            "d2 to p1 over shared memory: stuck (no progress for 5 s)",
        ]
        assert await tab.js("document.querySelectorAll('#drawn .lane-bad').length") == 1
        await tab.js("document.querySelector('#drawn .lane').focus()")
        await tab.press("Tab")
        assert await tab.text("#drawn .said") == said[1]
        assert await tab.js("document.documentElement.scrollWidth") <= 400
        assert await tab.js("LaneMap.map([], []).length") == 0
        await picture(tab, "page-lanes.png", "#drawn")


def sold() -> Iterator[LedgerRow]:
    for tenant, requests, usd in (("acme", 40, 0.077), ("search", 12, 0.0125)):
        for number in range(requests):
            yield LedgerRow(
                request_id=f"{tenant}-{number}", at_s=time.time() - 60, seconds=2.0, tenant=tenant, key_id="",
                model="tiny", endpoint="chat.completions", outcome="ok", input_tokens=900, cached_tokens=2100,
                output_tokens=350, reasoning_tokens=0, prefill_device_s=0.2, decode_device_s=1.1, charged_usd=usd,
            )  # fmt: skip


async def test_money_is_shown_where_a_ledger_is_kept(browser: Browser, cluster: Cluster, tmp_path: Path) -> None:
    prices = PriceList(device_hour=36.0, prices=())
    ledger = RequestLedger(LedgerStore(ledger_database(tmp_path / "ledger.db")), prices, cluster.fleet, model="tiny")
    async with operating(cluster, history=an_hour(UNTIL), ledger=ledger) as (client, _):
        assert (await ask(client, "first")).status_code == 200
        for row in sold():
            ledger.store.write(row)
        await asyncio.to_thread(ledger.close)
        ledger.store = LedgerStore(ledger_database(tmp_path / "ledger.db"))
        async with browser.tab(str(client.base_url)) as tab:
            await tab.until("document.querySelector('#money tbody tr')")
            rows = await tab.js(
                "[...document.querySelectorAll('#money tbody tr')]"
                ".map((row) => [...row.cells].map((one) => one.innerText))"
            )
            assert ["without a name", "1", "30", "0", "6"] in [row[:5] for row in rows]
            assert [row[5] for row in rows if row[0] == "acme"] == ["$3.08"]
            assert "of that was idle" in await tab.text("#idle")
            assert tab.troubles == []
            await picture(tab, "page-money.png", "#money")


SMALL, LARGE = DesiredFleet(counts={WorkerRole.DECODE: 1}), DesiredFleet(counts={WorkerRole.DECODE: 3})


class ShownOwner(NoFleetOwner):
    """The owner of a fleet that its planner has changed."""

    async def view(self) -> FleetReport:
        decided = CapacityDecision(
            at_s=UNTIL, desired=SMALL.counts, counts=LARGE.counts, reason="answers are late", attainment=0.5,
            arrival_rate=2.0, num_waiting=7, change=1,
        )  # fmt: skip
        decision = replace(decided, desired=LARGE.counts, reason="100.0% in time", attainment=1.0, change=0)
        return FleetReport(
            desired=LARGE, serving={WorkerRole.DECODE: 1}, waiting_for=("decode-2 to serve",),
            changes=(
                FleetChange(number=1, kind=OrderKind.SCALE, who="planner", why="answers are late", before=SMALL,
                            after=LARGE, at_s=UNTIL),
            ),
            planner=PlannerReport(
                ttft_s=1.0, tpot_s=0.05, attainment=0.95, least=SMALL.counts, most=LARGE.counts,
                decisions=(decided, decision, decision, decision),
            ),
        )  # fmt: skip


async def test_capacity_decisions_are_shown_with_reasons(browser: Browser, cluster: Cluster) -> None:
    async with operating(cluster, fleet_owner=ShownOwner()) as (client, _), browser.tab(str(client.base_url)) as tab:
        await tab.until("document.querySelector('#capacity table')")
        text = await tab.js("document.querySelector('#capacity').innerText")
        await picture(tab, "page-capacity.png", "#capacity")
        assert tab.troubles == []
    for part in (
        "3 decode, waiting for decode-2 to serve",
        "95 % of the requests within 1000 ms to the first token and 50 ms between tokens, with decode 1 to 3",
        "planner\t3 decode\tunder way\tanswers are late",
    ):
        assert part in text, text
    rows = [line.split("\t") for line in text.splitlines() if "\t" in line]
    assert [row[-2:] for row in rows[1:3]] == [["keep", "100.0% in time"], ["3 decode", "answers are late"]]
