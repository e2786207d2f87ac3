"""Clusters of fake workers, closed when a test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.unit.router.fake_cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Prefill and decode, one worker each."""
    made = Cluster()
    await made.add("p0", "d0")
    yield made
    await made.close()


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Cluster]]:
    """Clusters of other shapes and settings; they begin empty."""
    made: list[Cluster] = []

    def build(**settings: Any) -> Cluster:
        made.append(Cluster(**settings))
        return made[-1]

    yield build
    for each in made:
        await each.close()
