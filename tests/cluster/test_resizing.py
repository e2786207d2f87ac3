"""A pool that grows by one worker and shrinks by one, with real processes, while it answers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed

pytestmark = pytest.mark.cluster

NUM_STREAMS = 4


def workers_of(baton: Deployed) -> dict[str, Any]:
    return {worker["worker_id"]: worker for worker in baton.status()["workers"]}


def test_a_pool_grows_and_shrinks_with_nothing_lost_and_nothing_left(deploy: Callable[..., Deployed]) -> None:
    ports = ("--port", "0", "--grpc-port", "0")
    baton = deploy(
        "serve",
        "--model",
        str(DEMO),
        "--served-name",
        "demo",
        *PRECISE,
        *ports,
        "--policy",
        "round_robin",
        program="tests.cluster.resized",
    )
    prompts = [f"{LONG}# {number}\n" for number in range(NUM_STREAMS)]
    long = {"max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        expected = list(clients.map(lambda prompt: baton.text(prompt, **long), prompts))

    baton.process.send_signal(signal.SIGUSR1)
    baton.wait_for("^there are 2 decode workers")
    assert sorted(workers_of(baton)) == ["decode-0", "decode-1", "prefill-0"]
    [pid] = baton.worker_pids("decode-1")

    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        asked = [clients.submit(baton.text, prompt, **long) for prompt in prompts]
        baton.wait_until(lambda: workers_of(baton)["decode-1"]["load"]["num_running"] > 0)
        baton.process.send_signal(signal.SIGUSR2)
        assert [one.result() for one in asked] == expected
    baton.wait_for("^there are 1 decode workers")
    assert sorted(workers_of(baton)) == ["decode-0", "prefill-0"]
    assert pid not in baton.processes()
    assert baton.count("^decode-0: runs in process") == 1

    assert baton.stop(signal.SIGINT) == 0, baton.log
    assert baton.processes() == {}
