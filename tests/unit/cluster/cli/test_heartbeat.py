"""The file by which an orchestrator sees that `baton pools` is alive."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cluster.cli.pools_verb import _keep_touching
from tests.unit.cluster.virtual_time import run_virtually


def test_the_file_is_touched_at_once_and_again(tmp_path: Path) -> None:
    file = tmp_path / "alive"

    async def beats() -> tuple[bool, float]:
        beating = asyncio.create_task(_keep_touching(file))
        await asyncio.sleep(0.5)
        at_once = file.exists()
        os.utime(file, (0, 0))
        await asyncio.sleep(1.0)
        beating.cancel()
        return at_once, file.stat().st_mtime

    at_once, touched_s = run_virtually(beats())
    assert at_once
    assert touched_s > 0


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def beats() -> None:
        beating = asyncio.create_task(_keep_touching(tmp_path / "missing" / "alive"))
        await asyncio.sleep(1.5)
        assert not beating.done()
        beating.cancel()

    run_virtually(beats())
    assert caplog.text.count("--heartbeat") == 2
