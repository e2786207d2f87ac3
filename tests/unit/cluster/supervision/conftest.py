"""A supervisor over staged workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.config.cluster_config import SupervisionConfig
from cluster.supervision.supervisor import Supervisor
from tests.unit.cluster.supervision.staged_supervisor import Stage, supervisor_of


@pytest.fixture
async def stage() -> Stage:
    return Stage()


@pytest.fixture
async def supervisor(stage: Stage) -> AsyncIterator[Supervisor]:
    made = supervisor_of(stage, SupervisionConfig(initial_backoff_s=1.0, health_period_s=7.0, max_failed_checks=3))
    yield made
    await made.stop()
