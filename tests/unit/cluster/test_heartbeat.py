"""The file by which an orchestrator sees that `baton pools` is alive."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cluster.supervise import _beat
from tests.unit.cluster.virtual_time import run_virtually


async def beat_for(seconds: float, file: Path) -> None:
    beating = asyncio.create_task(_beat(file))
    await asyncio.sleep(seconds)
    beating.cancel()


def test_the_file_is_touched_at_once_and_again(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    run_virtually(beat_for(0.5, file))
    assert file.exists()
    os.utime(file, (0, 0))
    run_virtually(beat_for(2.5, file))
    assert file.stat().st_mtime > 0


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_virtually(beat_for(0.5, tmp_path / "missing" / "alive"))
    assert "--heartbeat" in caplog.text
