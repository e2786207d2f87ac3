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
