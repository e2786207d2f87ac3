"""The page at /: it comes whole, is let in nowhere by itself, turns nothing it is told into HTML, shows the cluster."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from cluster.cli.admin_client import DEFAULT_URL
from kvtransfer.hashing import chain_hashes
from protos.release import VERSION
from protos.values import BlockRemoved, BlockStored, Tier
from router.admission.admission import Refused
from router.auth.auth import AccessControl
from router.auth.tenants import Tenant, hash_of
from router.fleet.member import WorkerState
from router.request_metrics import RequestMetrics
from router.router_metrics import Scraped, admission_metrics, fleet_metrics
from tests.unit.router.fake_cluster import PROMPT, Cluster
from tests.unit.router.fake_worker import BLOCK_SIZE
from tests.unit.router.operating import ask, operating
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

ADMIN, ACME = "sk-baton-admin", "sk-baton-acme"
TENANTS = f'admin_keys = ["{hash_of(ADMIN)}"]\n[tenants.acme]\nkeys = ["{hash_of(ACME)}"]\n'
STORY = Path(__file__).with_name("page.mjs")


class Document(HTMLParser):
    """The elements with their attributes, and the text of each kind of element."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.headers = response.headers
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._within = ""
        self.feed(response.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._within] = self.texts.get(self._within, "") + data

    def policy(self) -> dict[str, str]:
        told = (line.strip().partition(" ") for line in self.headers["content-security-policy"].split(";"))
        return {name: value for name, _, value in told}


async def fetch(**changes: Any) -> Document:
    gateway = make_gateway(Scripted(saying("hi")), **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return Document(response)


async def test_it_loads_nothing_from_elsewhere() -> None:
    page = await fetch()
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert not re.match(r"\w+:(?!image/svg)|//", attributes.get(name) or ""), (tag, attributes)
    assert not re.search(r"@import|url\(", page.texts["style"])
    assert "//" not in re.sub(r"^\s*//.*|\s// .*|  //.*", "", page.texts["script"], flags=re.MULTILINE)
    policy = page.policy()
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"


async def test_its_own_script_and_style_run_and_no_others() -> None:
    page = await fetch()
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert page.policy()[f"{kind}-src"] == f"'sha256-{digest}'"


async def test_no_data_becomes_html() -> None:
    page = await fetch()
    script = page.texts["script"]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(|DOMParser", script)
    assert page.policy()["require-trusted-types-for"] == "'script'", "browsers that know it hold the script to that"

    name = """<img src=x onerror=alert(1)>"'</title>{{script}}{{asks_for_keys}}"""
    hostile = await fetch(card=replace(make_gateway(None).card, name=name))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in page.elements]
    [html] = [attributes for tag, attributes in hostile.elements if tag == "html"]
    assert html["data-model"] == name


async def test_the_page_needs_no_key_and_the_data_do(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    gateway = make_gateway(Scripted(saying("hi")), access=AccessControl(tmp_path / "tenants.toml"))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert 'data-asks-for-keys="true"' in page.text
        asked = set(re.findall(r'get\(["`](\w+/\w+)', page.text))
        assert asked == {"admin/status", "admin/requests", "admin/history"}
        for path in asked:
            assert (await client.get(f"/{path}")).status_code == 401
            admitted = await client.get(f"/{path}", headers={"authorization": f"Bearer {ADMIN}"})
            assert admitted.status_code == 200


async def test_a_key_that_is_typed_in_is_kept_in_the_tab_alone() -> None:
    script = (await fetch()).texts["script"]
    assert "sessionStorage.setItem" in script
    assert not re.search(r"localStorage|indexedDB|cookie", script)


async def test_the_request_to_try_is_one_that_the_model_takes() -> None:
    for template, has_chat in (({}, "true"), ({"template": None}, "false")):
        page = await fetch(**template)
        [html] = [attributes for tag, attributes in page.elements if tag == "html"]
        assert (html["data-has-chat"], html["data-asks-for-keys"]) == (has_chat, "false")


async def test_the_metrics_it_reads_are_told(cluster: Cluster) -> None:
    script, registry = (await fetch()).texts["script"], RequestMetrics().registry
    registry.register(Scraped(lambda: fleet_metrics(cluster.fleet)))
    admission: Any = SimpleNamespace(num_waiting=0, refused=Refused())
    registry.register(Scraped(lambda: admission_metrics(admission)))
    told = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE))
    read = set(re.findall(r'"(baton_\w+)"', script))
    assert read
    assert read <= told


async def node(*arguments: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", *arguments, stdout=pipe, stderr=pipe)
    said, trouble = await process.communicate()
    assert process.returncode == 0, trouble.decode()
    return said.decode()


TOLD = [
    f"Baton {VERSION} tiny", "ready, but d1 is lost .*", "as of .*",
    r"requests in flight \| 1 \|", r"requests ended \| 2 \|",
    r"prefill \| 1/1 \|.*", r"decode \| 1/2 \| .* \| 0 \| 0 \| 0 B \|", r"first token( \| [\d.]+ m?s){3} \| 2 \|",
    r"invalid_request \| 1 \|", r"p0 \| ready \| cpu \| 127.0.0.1:.*", r"d0 \| ready \| cpu \| 127.0.0.1:.*",
    r"d1 \| lost: .* \| cpu \| 127.0.0.1:\d+( \| -){6} \|", r"running \| .* \| running \| 30 \| .* \| d0 \|",
    r"ended \| .* \| length \| 30 \| 0 \| 6 \| .* \| p0 \| d0 \|", "Forget the key",
]  # fmt: skip
WHY = [".*: p0 prefills, d0 decodes; decision to first token .*", "cache of p0: 0 of 7 blocks .*"]
DOOR, WRONG = "Whoever wants to see this cluster needs a key.", "This key does not open /admin.*"


def shown(lines: list[str]) -> list[str]:
    """The texts that are on the page."""
    return [pattern for pattern in [*TOLD, *WHY, DOOR, WRONG] if any(re.fullmatch(pattern, line) for line in lines)]


async def story(cluster: Cluster, writer: str, directory: Path, href: str = "") -> dict[str, list[str]]:
    """The pages of a visitor after one request, while `writer` runs another."""
    if shutil.which("node") is None or await node("--print", "typeof fetch") != "function\n":
        pytest.skip("there is no node that has fetch, in which the page's script would run: version 18 does")
    (directory / "tenants.toml").write_text(TENANTS)
    async with operating(cluster, access=AccessControl(directory / "tenants.toml")) as (client, _):
        client.headers["authorization"] = f"Bearer {ACME}"
        assert (await ask(client, "ended")).status_code == 200
        assert (await client.post("/v1/completions", json={"model": "tiny"})).status_code == 400
        worker = cluster[writer]
        worker.pause_after, count = 2, len(worker.submitted)
        running = asyncio.create_task(ask(client, "running"))
        await worker.until(lambda: len(worker.submitted) == count + 1)
        await cluster.add("d1")
        await cluster["d1"].die()
        await cluster.until_state("d1", WorkerState.LOST)
        url = str(client.base_url).rstrip("/")
        seen: dict[str, list[str]] = json.loads(await node(str(STORY), url, ADMIN, href or f"{url}/"))
        worker.go()
        assert (await running).status_code == 200
    return seen


async def test_why_tells_the_deciding_cost_first_with_its_unit(make: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make(policy="slo", local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    why = "\n".join((await story(cluster, "d0", tmp_path))["why"])
    [(total, reading)] = re.findall(r"\np0 \| ([\d.,]+) \| prefill \| 0 \| (.*) \|\n", why)
    assert float(total) == pytest.approx(sum(float(line) for line in reading.split(" | ")), rel=0.02)
    assert float(total) > 0.1, "milliseconds"
    assert "\nworker | total (ms) | role | cached | overhead (ms) | queue (ms) |" in why
    assert re.search(r"\nworker \| total \(ms\) \| role \| cached \| decode \(ms\) \|.* prefill \(ms\) \|\nd0 \|", why)
    both = r"[\d.]+ m?s expected, [\d.]+ m?s measured"
    assert re.search(rf"; decision to first token {both}; between tokens {both}\n", why)


async def test_why_shows_host_hits_and_shadow_choices(make: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make(policy="slo", shadow_policy="round_robin")
    hashes = chain_hashes(PROMPT, BLOCK_SIZE, salt=Tenant(name="acme").cache_salt(b""))
    await cluster.add("d0")
    on_host = BlockStored(hashes=hashes[1:3], parent=hashes[0], tier=Tier.HOST)
    cluster["d0"].tell(BlockStored(hashes=hashes[:3]), on_host, BlockRemoved(hashes=hashes[1:3]))
    await cluster.until(lambda: cluster.fleet.status()[0].num_host_blocks == 2)
    why = "\n".join((await story(cluster, "d0", tmp_path))["why"])
    assert f" | decode | {3 * BLOCK_SIZE} ({2 * BLOCK_SIZE} host) | " in why
    assert re.search(r"; decision to first token [\d.]+ m?s \(load [\d.]+ m?s\) expected", why)
    assert "3 expected, 2 of them in host memory" in why
    assert re.search(r"\nround_robin would have taken d0 alone: first token [+-][\d.]+ m?s\n", why)


async def test_costs_without_a_unit_and_lone_workers_are_shown(make: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make(policy="round_robin")
    await cluster.add("d0")
    why = (await story(cluster, "d0", tmp_path))["why"]
    [heading] = [line for line in why if line.startswith("worker | total")]
    assert heading == "worker | total | role | cached | turn | prefill |"
    assert any(re.fullmatch(r"ended \| .* \| d0 \| d0 \|", line) for line in why)


@pytest.mark.parametrize(
    ("href", "flag"),
    [
        (f"{DEFAULT_URL}/", ""),
        ("http://127.0.0.1:8011/", " --url http://127.0.0.1:8011"),
        ("https://llm.example/baton/?x#y", " --url https://llm.example/baton"),
    ],
)
async def test_the_commands_it_tells_reach_this_gateway(cluster: Cluster, tmp_path: Path, href: str, flag: str) -> None:
    seen = "\n".join((await story(cluster, "d0", tmp_path, href))["why"])
    told = re.findall(r"baton (?:status|why|chat)\b[^,\n]*", seen)
    assert told == [f"baton {verb}{flag}" for verb in ("why ended", "status", "why", "chat")]


async def test_escape_closes_the_panel_and_goes_back_to_the_request(cluster: Cluster, tmp_path: Path) -> None:
    seen = await story(cluster, "d0", tmp_path)
    assert shown(seen["another key"]) == [*TOLD, *WHY]
    assert shown(seen["Escape"]) == TOLD
    assert seen["Escape"][-1] == "[focus: ended]"
    assert shown(seen["why, once more"]) == [*TOLD, *WHY]


async def test_who_has_a_key_sees_the_cluster_until_it_is_forgotten(cluster: Cluster, tmp_path: Path) -> None:
    seen = await story(cluster, "d0", tmp_path)
    assert shown(seen["opened"]) == [DOOR]
    assert shown(seen["a wrong key"]) == [WRONG]
    assert shown(seen["the key"]) == TOLD
    assert shown(seen["why"]) == shown(seen["another tab and back"]) == [*TOLD, *WHY]
    assert shown(seen["the moment it is forgotten"]) == []
    assert shown(seen["forgotten"]) == [DOOR]
    assert shown(seen["the key after a wrong one"]) == TOLD
    assert shown(seen["forgotten again"]) == [DOOR]
    for step in ("opened", "a wrong key", "forgotten", "forgotten again"):
        assert seen[step][-1] == "[key: none, looks to come: 0]", step
    for step in ("the key", "another tab and back", "the key after a wrong one"):
        assert seen[step][-1] == f"[key: {ADMIN}, looks to come: 1]", step

    assert seen["and the look from before"] == seen["another tab and back"]
    assert seen["and what had been asked with the key"] == seen["forgotten"]
    assert seen["and the wrong one's refusal"] == seen["the key after a wrong one"]
    assert seen["and why it runs"] == seen["forgotten again"]
