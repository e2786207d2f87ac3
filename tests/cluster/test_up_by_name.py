"""`baton up NAME` in an empty folder with an empty cache: the first answer takes one command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.deployed import DEMO, PRECISE, Deployed
from tests.unit.cluster.hub.fake_hub import FakeHub, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


TOKEN = "of-a-worker-and-its-gateway"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub()) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield fake


def test_a_name_is_downloaded_and_answers(hub: FakeHub) -> None:
    commit = hub.add("acme/tiny", {file.name: file.read_bytes() for file in DEMO.iterdir()})
    cluster = Deployed("up", "acme/tiny", "--colocated", "--device", "cpu", "--port", "0")
    try:
        texts = {cluster.text("def join(first, second):", model=name) for name in ("tiny", "acme/tiny")}
        assert len(texts) == 1
        model, alias = httpx.get(f"{cluster.url}/v1/models").json()["data"]
        assert (model["id"], model["hub"]) == ("tiny", f"acme/tiny@{commit}")
        assert alias["id"] == "acme/tiny"
        (info,) = [worker["info"] for worker in cluster.status()["workers"]]
        assert info["model_path"].rpartition("/")[2] == commit
        assert (info["dtype"], info["speculation"], info["model_len"]) == ("bfloat16", "off", 2048)
    finally:
        cluster.kill()


def test_a_gateway_alone_downloads_no_weights(hub: FakeHub) -> None:
    hub.add("acme/tiny", {file.name: file.read_bytes() for file in DEMO.iterdir()})
    worker = Deployed(
        "worker", "--model", str(DEMO), "--served-name", "tiny", "--set", f"peers.token={TOKEN}", *PRECISE
    )
    address = worker.wait_for(r"serves \S+ at (\S+)$")[1]
    gateway = Deployed(
        "gateway", "--model", "acme/tiny", "--port", "0", "--worker", address, "--set", f"peers.token={TOKEN}"
    )
    try:
        gateway.wait_for("is ready$")
        assert gateway.text("def join(first, second):", model="acme/tiny")
        assert hub.sent == 0
    finally:
        for process in (gateway, worker):
            process.kill()
