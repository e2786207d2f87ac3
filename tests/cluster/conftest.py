"""One `baton up` for the whole run: starting Ray takes seconds, and most tests only ask it something."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.deployed import BATON, PRECISE, Deployed
from tests.cluster.redis_server import RedisServer


@pytest.fixture(scope="session")
def up() -> Iterator[Deployed]:
    """The demo model on one prefill and one decode worker, ready. Who kills its workers waits until they are back."""
    deployed = Deployed("up", "--port", "0", "--grpc-port", "0", *PRECISE)
    try:
        deployed.wait_for("^serving ")
        yield deployed
        # To every process of it, Ray's too, as an init system does; Ctrl-C is tested in test_up_stops.py.
        assert deployed.stop(signal.SIGTERM) == 0, deployed.log
        assert deployed.processes() == {}
    finally:
        deployed.kill()


@pytest.fixture
def deploy() -> Iterator[Callable[..., Deployed]]:
    """Starts other ones; whatever is left of them is killed in the end."""
    made: list[Deployed] = []

    def start(*arguments: str, program: str = BATON) -> Deployed:
        made.append(Deployed(*arguments, program=program))
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
