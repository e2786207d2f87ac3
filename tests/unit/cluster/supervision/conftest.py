"""A supervisor over staged workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.config.cluster_config import SupervisionConfig
from cluster.supervision.supervisor import Supervisor
from tests.unit.cluster.supervision.staged_supervisor import (
    PLANS,
    Stage,
)


@pytest.fixture
async def stage() -> Stage:
    return Stage()


@pytest.fixture
async def supervisor(stage: Stage) -> AsyncIterator[Supervisor]:
    made = Supervisor(
        PLANS,
        launcher=stage,
        announcer=stage,
        control=stage,
        config=SupervisionConfig(initial_backoff_s=1.0, health_period_s=7.0, max_failed_checks=3),
        first_incarnation=100,
        watch=stage.shown.append,
        clock=lambda: 0.0,
        sleep=stage.sleep,
    )
    yield made
    await made.stop()
