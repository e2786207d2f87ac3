"""`baton serve`: what fails at the start is shown once."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.cli import serve
from cluster.config.settings import make_config
from cluster.process.logs import LogFormat
from cluster.ray.pools import Pools
from protos.errors import Misconfigured
from protos.values import KVLayout, LaneAddress, WorkerInfo, WorkerRole
from workers.worker_config import WorkerConfig


async def test_a_gateway_that_fails_to_open_retrieves_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    async def prepare(_: Pools) -> None:
        await asyncio.Event().wait()

    def open_faces(*_: Any, **__: Any) -> None:
        raise Misconfigured("prices: nope.toml is not there")

    monkeypatch.setattr(Pools, "prepare", prepare)
    monkeypatch.setattr(serve, "open_faces", open_faces)
    deployment = serve.ServedCluster([make_config(serve.DEMO)], Console(quiet=True), LogFormat.TEXT)
    with pytest.raises(Misconfigured, match=r"nope\.toml"):
        await deployment.run()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    await deployment.end()
    gc.collect()
    assert logged == []


def test_one_machine_keeps_batches_in_the_users_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "baton" / "batches"

    def kept(**settings: Any) -> str:
        return serve.with_batches(make_config(serve.DEMO | settings)).router.batch.folder

    assert kept() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept(router={"batch": {"folder": "mine"}}) == "mine"
    assert kept(router={"database": "postgresql://db/baton"}) == ""
    assert kept(ray={"address": "auto"}) == "", "a cluster names its own"
    folder.rmdir()
    folder.touch()
    assert kept() == "", "a place that cannot be used is no reason not to serve"


def report(role: WorkerRole = WorkerRole.COLOCATED, **further: Any) -> WorkerInfo:
    layout = KVLayout.dense(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    reported: dict[str, Any] = {
        "worker_id": f"{role}-0", "incarnation": 1, "role": role, "model": "m", "address": "", "layout": layout,
        "lane": LaneAddress(worker_id=f"{role}-0", host="", port=0, incarnation=1), "max_model_len": 40960,
        "model_len": 40960, "vocab_size": 9, "num_blocks": 1024, "dtype": "bfloat16", "speculation": "off",
    }  # fmt: skip
    return WorkerInfo(**reported | further)


def test_the_workers_choices_are_shown_with_reasons() -> None:
    """No GPU is here: the report is made up as a worker on one writes it."""
    shown = serve.choices(WorkerConfig(model="m"), [report(device="cuda", weights="BF16, 16 bits a weight")])
    expected: list[tuple[str, ...]] = [
        ("cuda",), ("bfloat16", "16 bits"), ("1.75 GiB", "16,384 tokens", "0.9 of the GPU"), ("40,960",), ("off",),
    ]  # fmt: skip
    for line, parts in zip(shown, expected, strict=True):
        assert [part for part in parts if part not in line] == []
    config = WorkerConfig(model="m", speculate="auto", num_blocks=7, device="cpu")
    pools = [report(WorkerRole.PREFILL, max_model_len=112, num_blocks=7), report(WorkerRole.DECODE, num_blocks=8)]
    expected = [
        ("cpu", "worker.device"), ("bfloat16",), ("prefill", "112 tokens", "decode", "128 tokens", "worker.num_blocks"),
        ("112", "40,960"), ("off", "auto"),
    ]  # fmt: skip
    for line, parts in zip(serve.choices(config, pools), expected, strict=True):
        assert [part for part in parts if part not in line] == []


def test_one_gpu_gets_one_colocated_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def pools(gpus: str, **settings: Any) -> dict[str, int]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        counts = serve.on_one_gpu(make_config(serve.DEMO | settings)).pools.counts()
        return {str(role): count for role, count in counts.items()}

    two = {"prefill": 1, "decode": 1}
    assert pools("0") == {"colocated": 1}
    assert pools("0,1") == pools("") == pools("-1") == two
    assert pools("0,1,2", worker={"tp": 2}) == {"colocated": 1}
    assert pools("0", worker={"device": "cpu"}) == pools("0", ray={"address": "auto"}) == two
    assert pools("0", pools=two) == two
