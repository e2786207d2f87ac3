"""Clusters of fake workers, closed when a test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from protos.limited import limited_process
from router.text.grammar import checker
from tests.unit.router.fake_cluster import Cluster


@pytest.fixture(autouse=True)
def _waits_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that compile grammars and fill templates in answer, however long they take to get a core."""
    monkeypatch.setattr(limited_process, "PATIENCE_S", 100.0)
    monkeypatch.setattr(checker, "WAIT_S", 100.0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Prefill and decode, one worker each."""
    made = Cluster()
    await made.add("p0", "d0")
    yield made
    await made.close()


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Cluster]]:
    """Makes clusters of other shapes and settings, empty at first."""
    made: list[Cluster] = []

    def build(**settings: Any) -> Cluster:
        made.append(Cluster(**settings))
        return made[-1]

    yield build
    for each in made:
        await each.close()
