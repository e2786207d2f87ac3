"""The only decode worker dies under seeded streams: they go on at the prefill worker, token for token, and new requests
are served there while no decode worker is back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.deployed import PRECISE, Deployed
from tests.cluster.test_chaos import Choice, answer, check

pytestmark = pytest.mark.cluster

NUMBERS = (5, 8, 11)  # seeded streams of one and of two choices, and logprobs: tests/cluster/test_chaos.py


@pytest.fixture(scope="module")
def pair() -> Iterator[Deployed]:
    """A worker that died stays away for longer than the test looks."""
    away = ("--set", "supervision.initial_backoff_s=90", "--set", "supervision.max_backoff_s=90")
    deployed = Deployed("up", "--prefill", "1", "--decode", "1", "--port", "0", "--grpc-port", "0", *PRECISE, *away)
    try:
        deployed.wait_for("^serving ")
        yield deployed
    finally:
        deployed.kill()


def degraded(pair: Deployed) -> str:
    ready = httpx.get(f"{pair.url}/ready", timeout=10.0)
    assert ready.status_code == 200, ready.text
    return str(ready.json()["degraded"])


def decodes(pair: Deployed) -> bool:
    return any(one["load"]["num_running"] for one in pair.status()["workers"] if one["worker_id"] == "decode-0")


def test_streams_go_on_and_new_requests_are_served_while_the_only_decode_worker_is_away(pair: Deployed) -> None:
    undisturbed = [answer(pair.url, number) for number in NUMBERS]
    assert degraded(pair) == ""
    over = threading.Event()

    def again_and_again(place: int) -> list[list[Choice]]:
        seen = [answer(pair.url, NUMBERS[place])]
        while not over.is_set():
            seen.append(answer(pair.url, NUMBERS[place]))
        return seen

    with ThreadPoolExecutor(len(NUMBERS)) as clients:
        asking = [clients.submit(again_and_again, place) for place in range(len(NUMBERS))]
        try:
            pair.wait_until(lambda: decodes(pair))
            os.kill(pair.worker_pids("decode-0")[0], signal.SIGKILL)
            pair.wait_until(lambda: "meanwhile: decode-0 is lost" in degraded(pair))
            over.set()
            for place in range(len(NUMBERS)):
                check(answer(pair.url, NUMBERS[place]), undisturbed[place])
            name = httpx.get(f"{pair.url}/admin/requests?limit=1", timeout=10.0).json()["requests"][0]["request_id"]
            told = httpx.get(f"{pair.url}/admin/requests/{name}", timeout=10.0).text
            assert "stands in for the decode pool" in told
            assert "the others stand in and serve whole requests meanwhile" in degraded(pair), (
                "decode-0 is back too soon"
            )
        finally:
            over.set()
        for place, one in enumerate(asking):
            for seen in one.result():
                check(seen, undisturbed[place])
