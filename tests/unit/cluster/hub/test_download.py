"""Names of the hub become paths: only what is served is fetched, resumed, checked, and never served by half."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from cluster.config.cluster_config import ClusterConfig, RayConfig
from cluster.hub.download import cache_folder, latest_commit, local_model
from cluster.hub.local_models import with_cached_models, with_local_models
from protos.errors import BadCheckpoint, BatonError, Misconfigured, Unavailable
from protos.model_files.hub_name import HubName
from router.router_config import RouterConfig
from tests.unit.cluster.hub.conftest import CHUNK
from tests.unit.cluster.hub.fake_hub import FakeHub
from workers.worker_config import WorkerConfig

WEIGHTS = random.Random(0).randbytes(300_000)
TINY = {
    "config.json": b"{}", "tokenizer.json": b"{} ", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": WEIGHTS + b"1", "original/params.json": b"[]", "README.md": b"#",
}  # fmt: skip


def blobs(repository: str) -> Path:
    return cache_folder(HubName(repository=repository)) / "blobs"


def test_only_served_files_are_downloaded(hub: FakeHub) -> None:
    commit = hub.add("acme/tiny", TINY)
    folder = Path(local_model("acme/tiny"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == commit
    assert HubName.of_cached(folder) == HubName(repository="acme/tiny", revision=commit)
    assert hub.sent == len(WEIGHTS)


def test_a_cached_revision_stays_until_the_hub_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.add("acme/tiny", TINY)
    local_model("acme/tiny")
    second = hub.add("acme/tiny", {**TINY, "model.safetensors": WEIGHTS + b"2"})
    hub.requests.clear()
    assert local_model("acme/tiny").endswith(first)
    assert not hub.requests, "the same model after a restart, even without a network"
    assert local_model("acme/tiny@main").endswith(second)
    assert local_model("acme/tiny").endswith(second)
    assert local_model(f"acme/tiny@{first}").endswith(first)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_model("acme/tiny@main").endswith(second)


@pytest.mark.parametrize("name", ["acme/tiny:Q4_K_M", "acme/tiny:q4_k_m", "acme/tiny:tiny-Q4_K_M.gguf"])
def test_one_gguf_model_is_downloaded_with_its_shards(hub: FakeHub, name: str) -> None:
    shards = {f"Q4_K_M/tiny-Q4_K_M-0000{number}-of-00002.gguf": b"GGUF%d" % number for number in (1, 2)}
    others = {"tiny-Q8_0.gguf": b"GGUF8", "mmproj-Q4_K_M.gguf": b"GGUFm", "config.json": b"{}", "chat.jinja": b"-"}
    template = {"Q4_K_M/additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    hub.add("acme/tiny", {**shards, **others, **template})
    path = Path(local_model(name))
    assert path.name == "tiny-Q4_K_M-00001-of-00002.gguf"
    assert [one.read_bytes() for one in sorted(path.parent.glob("*.*"))] == [b"GGUF1", b"GGUF2"]
    assert [one.read_bytes() for one in path.parent.glob("*/*")] == [b"{{ tools }}"]
    assert not list(path.parents[1].glob("*.*"))


def test_the_index_says_which_safetensors_are_served(hub: FakeHub) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    weights = {f"model-{number}.safetensors": b"%d" % number for number in (1, 2, 3)}
    hub.add("acme/tiny", {"config.json": b"{}", "model.safetensors.index.json": index, **weights})
    names = {path.name for path in Path(local_model("acme/tiny")).glob("*.safetensors")}
    assert names == {"model-1.safetensors", "model-2.safetensors"}


@pytest.mark.parametrize("cut", [0, 1, 65_536, 299_999])
def test_a_broken_connection_is_resumed_where_it_broke(hub: FakeHub, cut: int) -> None:
    hub.add("acme/tiny", TINY)
    hub.cuts = [cut]
    folder = Path(local_model("acme/tiny"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent == len(WEIGHTS) + cut % CHUNK, "less than a chunk is fetched twice"


def test_a_later_start_resumes_and_serves_no_half(hub: FakeHub) -> None:
    hub.add("acme/tiny", TINY)
    hub.cuts = [100_000, *[0] * 20]
    with pytest.raises(Unavailable):
        local_model("acme/tiny")
    [partial] = blobs("acme/tiny").iterdir()
    assert partial.read_bytes() == WEIGHTS[:100_000]
    assert not (blobs("acme/tiny").parent / "snapshots").exists()
    hub.cuts.clear()
    assert (Path(local_model("acme/tiny")) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent == len(WEIGHTS)


def test_wrong_content_is_dropped(hub: FakeHub) -> None:
    hub.add("acme/tiny", TINY)
    hub.corrupts = True
    with pytest.raises(Unavailable):
        local_model("acme/tiny")
    assert not list(blobs("acme/tiny").iterdir())
    hub.corrupts = False
    assert (Path(local_model("acme/tiny")) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_snapshot_that_lacks_a_file_is_completed(hub: FakeHub) -> None:
    hub.add("acme/tiny", TINY)
    folder = Path(local_model("acme/tiny"))
    (folder / "tokenizer.json").unlink()
    assert (Path(local_model("acme/tiny")) / "tokenizer.json").read_bytes() == b"{} "
    assert hub.sent == len(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "fault", "error", "words"),
    [
        ("acme/none", {}, Misconfigured, ["acme/none", "hf auth login"]),
        ("acme/tiny@gone", {}, Misconfigured, ["gone"]),
        ("acme/tiny", {"resolve": (403, {"X-Error-Code": "GatedRepo"})}, Misconfigured, ["/acme/tiny", "hf auth"]),
        ("acme/tiny", {"resolve": (401, {"X-Error-Code": "GatedRepo"})}, Misconfigured, ["/acme/tiny", "HF_TOKEN"]),
        ("acme/tiny", {"api": (404, {})}, Misconfigured, ["acme/tiny"]),
        ("acme/tiny", {"api": (429, {"Retry-After": "7"})}, Unavailable, ["429", "7 s"]),
        ("acme/tiny", {"resolve": (429, {"Retry-After": "0"})}, Unavailable, ["429"]),
        ("acme/tiny", {"tokenizer.json": (500, {})}, Unavailable, ["500"]),
        ("acme/tiny", {"blobs": (500, {})}, Unavailable, ["500"]),
        ("acme/empty", {}, BadCheckpoint, ["pytorch_model.bin"]),
        ("acme/several", {}, BadCheckpoint, ["Q4_K_M", "Q8_0", "acme/several:FILE"]),
        ("acme/several:Q5_K_M", {}, BadCheckpoint, ["Q5_K_M", "Q4_K_M", "Q8_0"]),
        ("acme/tiny:Q4_K_M", {}, BadCheckpoint, ["Q4_K_M"]),
    ],
)  # fmt: skip
def test_unavailable_models_are_refused_with_a_fix(
    hub: FakeHub, name: str, fault: dict[str, Any], error: type[BatonError], words: list[str]
) -> None:
    hub.add("acme/tiny", TINY)
    hub.add("acme/empty", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    hub.add("acme/several", {"tiny-Q4_K_M.gguf": b"GGUF4", "tiny-Q8_0.gguf": b"GGUF8"})
    hub.faults = fault
    with pytest.raises(BatonError) as raised:
        local_model(name, "worker.adapters")
    assert type(raised.value) is error
    assert raised.value.param == "worker.adapters"
    assert all(word in raised.value.message for word in words), raised.value.message
    hub.faults = {"": (503, {})}
    with pytest.raises(BatonError):  # nothing half-downloaded is served
        local_model(name)


INDEX_OF_TWO = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"{}", "model.safetensors.index.json": INDEX_OF_TWO, "model-1.safetensors": b"1"},
        {"tiny-00002-of-00002.gguf": b"GGUF2"},
    ],
)
def test_a_part_of_a_model_is_not_served(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    hub.add("acme/tiny", files)
    with pytest.raises(BadCheckpoint):
        local_model("acme/tiny")
    commit = hub.add("acme/tiny", TINY)
    folder = cache_folder(HubName(repository="acme/tiny"))
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for name, content in files.items():
        (folder / "snapshots" / commit / name).write_bytes(content)
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(Misconfigured):
            local_model("acme/tiny")
    assert Path(local_model("acme/tiny"), "model.safetensors").read_bytes() == WEIGHTS


def test_without_a_network_or_offline_the_cache_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable):
        local_model("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Misconfigured) as raised:
        local_model("acme/tiny")
    assert str(tmp_path / "hub") in raised.value.message


def test_a_full_disk_is_reported_before_and_during(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", TINY)
    with monkeypatch.context() as patched:
        patched.setattr("cluster.hub.download.shutil.disk_usage", lambda _: SimpleNamespace(free=len(WEIGHTS) - 1))
        with pytest.raises(Misconfigured) as raised:
            local_model("acme/tiny")
    assert "HF_HOME" in raised.value.message
    assert not hub.sent
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patched.setattr("cluster.hub.download._PartialFile.write", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(Misconfigured) as raised:
            local_model("acme/tiny")
    assert "HF_HOME" in raised.value.message
    assert Path(local_model("acme/tiny"), "model.safetensors").read_bytes() == WEIGHTS


def test_the_latest_commit_need_not_be_known(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.hub.download.LOOK_S", 60.0)
    hub.add("acme/tiny", TINY)
    latest = hub.add("acme/tiny", TINY)
    assert latest_commit("acme/tiny") == latest
    assert latest_commit("acme/none") == ""


def test_weights_come_when_they_are_wanted(hub: FakeHub) -> None:
    """A gateway needs the small files only; a worker of the same machine completes them, and needs no network then."""
    hub.add("acme/tiny", TINY)
    for _ in range(2):
        folder = Path(local_model("acme/tiny", weights=False))
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert hub.sent == 0
    assert (Path(local_model("acme/tiny")) / "model.safetensors").read_bytes() == WEIGHTS
    hub.faults = {"": (503, {})}
    assert Path(local_model("acme/tiny", weights=False)) == Path(local_model("acme/tiny")) == folder


def test_a_path_stays_a_path(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    for path in ("acme/tiny", "./acme/none", "/acme/none", "acme", "a/b/c", "acme/tiny.gguf", "s3://acme/tiny"):
        assert local_model(path) == path
    assert not hub.requests


def test_another_machine_caches_the_commit_of_the_supervisor(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("acme/tiny", "acme/lora"):
        hub.add(name, TINY)
    worker = WorkerConfig(model="acme/tiny", adapters="sql=acme/lora", speculate="model:acme/tiny")
    config = ClusterConfig(worker=worker, router=RouterConfig(model_path=Path("acme/tiny"), model_name="tiny"))
    supervised = with_local_models(config)
    assert supervised.router.model_path == Path(supervised.worker.model)
    assert supervised.router.model_aliases == "acme/tiny"
    hub.add("acme/tiny", {**TINY, "config.json": b"[]"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    here = with_cached_models(supervised.worker)
    for path in (here.model, here.adapters.removeprefix("sql="), here.speculate.removeprefix("model:")):
        assert (tmp_path / "other") in Path(path).parents
        assert Path(path, "config.json").read_bytes() == b"{}"


def test_an_existing_ray_downloads_only_if_it_may(hub: FakeHub) -> None:
    hub.add("acme/tiny", TINY)
    router = RouterConfig(model_path=Path("acme/tiny"), model_name="tiny")
    config = ClusterConfig(worker=WorkerConfig(model="acme/tiny"), router=router, ray=RayConfig(address="auto"))
    with pytest.raises(Misconfigured) as raised:
        with_local_models(config)
    assert raised.value.param == "ray.downloads"
    assert not hub.requests
    assert with_local_models(replace(config, ray=replace(config.ray, downloads=True))).worker.model != "acme/tiny"
