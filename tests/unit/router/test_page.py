"""The page at /: it comes whole, is let in nowhere by itself, and turns nothing it is told into HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from prometheus_client import generate_latest

from router.admission.admission import Refused
from router.admission.metrics import AdmissionCollector
from router.admission.reception import Reception
from router.admission.tenants import hash_of
from router.metrics import RequestMetrics
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving

ADMIN = "sk-baton-admin"
TENANTS = f'admin_keys = ["{hash_of(ADMIN)}"]\n[tenants.acme]\nkeys = ["{hash_of("sk-baton-acme")}"]\n'


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
        told = (one.strip().partition(" ") for one in self.headers["content-security-policy"].split(";"))
        return {name: value for name, _, value in told}


async def fetch(**changes: Any) -> Document:
    gateway = make_gateway(Scripted(saying("hi")), **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False) as client:
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


async def test_what_it_is_told_never_becomes_html() -> None:
    page = await fetch()
    script = page.texts["script"]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(|DOMParser", script)
    assert page.policy()["require-trusted-types-for"] == "'script'", "browsers that know it hold the script to that"

    name = """<img src=x onerror=alert(1)>"'</title>{{script}}"""
    hostile = await fetch(card=replace(make_gateway(None).card, name=name))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in page.elements]
    [html] = [attributes for tag, attributes in hostile.elements if tag == "html"]
    assert html["data-model"] == name


async def test_the_page_needs_no_key_and_the_data_do(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    gateway = make_gateway(Scripted(saying("hi")), reception=Reception(tmp_path / "tenants.toml"))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert 'data-asks-for-keys="true"' in page.text
        asked = set(re.findall(r'get\(["`](\w+/\w+)', page.text))
        assert asked == {"admin/status", "admin/requests"}
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


async def test_the_metrics_it_reads_are_told() -> None:
    script, registry = (await fetch()).texts["script"], RequestMetrics().registry
    registry.register(AdmissionCollector(cast("Any", SimpleNamespace(num_waiting=0, refused=Refused()))))
    told = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE))
    read = set(re.findall(r'"(baton_\w+)"', script))
    assert read
    assert read <= told
