"""Clusters for the whole run: starting one takes 12 s of CPU time, and most tests only send it requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.chaos_models import model_flags
from tests.cluster.deployed import PRECISE, Deployed
from tests.cluster.redis_server import RedisServer
from tests.cluster.seeded import NUM_REQUESTS, Choice, answer


@pytest.fixture(scope="session")
def up() -> Iterator[Deployed]:
    """The demo model on one prefill and one decode worker, ready. A dead worker stays away for ten seconds; a test that
    kills one waits until it is back. `last_up` is for the test that stops it."""
    away = ("--set", "supervision.initial_backoff_s=10")
    deployed = Deployed("up", "--port", "0", "--grpc-port", "0", *PRECISE, *away, log_format="text")
    try:
        deployed.wait_for("^serving ")
        yield deployed
    finally:
        deployed.kill()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two prefill workers, two decode workers that speculate and two gateway processes, for tests that kill any of
    them. `last_four` is for the test that kills it as a whole. `BATON_CHAOS_MODEL` names another model."""
    model = model_flags(os.environ.get("BATON_CHAOS_MODEL", "demo"), tmp_path_factory.mktemp("model"))
    size = ("--prefill", "2", "--decode", "2", "--processes", "2", "--port", "0", "--grpc-port", "0")
    speculating = ("--speculate", "auto")
    quick = ("--set", "supervision.health_period_s=1")
    deployed = Deployed("up", *size, *PRECISE, *quick, *speculating, *model)
    try:
        deployed.wait_for("^serving ")
        yield deployed
    finally:
        deployed.kill()


@pytest.fixture
def last_up(up: Deployed) -> Deployed:
    """For one test, which runs after all others of `up` (tests/conftest.py)."""
    return up


@pytest.fixture
def last_four(four: Deployed) -> Deployed:
    return four


@pytest.fixture(scope="session")
def undisturbed(four: Deployed) -> list[list[Choice]]:
    """The answers of `four` to each seeded request while nothing dies, without speculation."""
    return [answer(four.url, number, speculation={"enabled": False}) for number in range(NUM_REQUESTS)]


@pytest.fixture
def deploy() -> Iterator[Callable[..., Deployed]]:
    """Starts clusters. Any that are left at the end are killed."""
    made: list[Deployed] = []

    def start(*arguments: str) -> Deployed:
        made.append(Deployed(*arguments))
        return made[-1]

    yield start
    for deployed in made:
        deployed.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()
