"""`kill -9` of the only worker of a pool under load: answers stay what they were, token for token, and new requests are
served while it is away; the worker comes back by itself."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.deployed import Deployed
from tests.cluster.seeded import Choice, answer, check

pytestmark = pytest.mark.cluster

NUMBERS = (5, 8, 11)  # seeded streams of one and of two choices, and logprobs


def degraded(up: Deployed) -> str:
    ready = httpx.get(f"{up.url}/ready", timeout=10.0)
    assert ready.status_code == 200, ready.text
    return str(ready.json()["degraded"])


def is_busy(up: Deployed, worker_id: str) -> bool:
    [load] = [worker["load"] for worker in up.status()["workers"] if worker["worker_id"] == worker_id]
    return bool(load["num_running"] or load["num_waiting"])


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_the_other_worker_stands_in_until_the_killed_one_is_back(up: Deployed, victim: str) -> None:
    undisturbed = [answer(up.url, number) for number in NUMBERS]
    assert degraded(up) == ""
    ready = rf"^worker {victim} at \S+ is ready"
    lives, meetings = up.count(rf"^{victim}: runs in process"), up.count(ready)
    [pid] = up.worker_pids(victim, life=lives)
    over = threading.Event()

    def again_and_again(place: int) -> list[list[Choice]]:
        seen = [answer(up.url, NUMBERS[place])]
        while not over.is_set():
            seen.append(answer(up.url, NUMBERS[place]))
        return seen

    with ThreadPoolExecutor(len(NUMBERS)) as clients:
        asking = [clients.submit(again_and_again, place) for place in range(len(NUMBERS))]
        try:
            up.wait_until(lambda: is_busy(up, "decode-0"))
            os.kill(pid, signal.SIGKILL)
            up.wait_until(lambda: f"meanwhile: {victim} is lost" in degraded(up))
            over.set()
            for place in range(len(NUMBERS)):
                check(answer(up.url, NUMBERS[place]), undisturbed[place])
            name = httpx.get(f"{up.url}/admin/requests?limit=1", timeout=10.0).json()["requests"][0]["request_id"]
            events = httpx.get(f"{up.url}/admin/requests/{name}", timeout=10.0).text
            assert up.count(ready) == meetings, f"{victim} is back too soon for this test"
            assert ("stands in for the decode pool" in events) == (victim == "decode-0")
        finally:
            over.set()
        for place, task in enumerate(asking):
            for seen in task.result():
                check(seen, undisturbed[place])
    up.wait_for(ready, times=meetings + 1)
    assert up.worker_pids(victim, life=lives + 1) != [pid]
    up.wait_until(lambda: degraded(up) == "")
    for place, number in enumerate(NUMBERS):
        check(answer(up.url, number), undisturbed[place])
    up.wait_until(lambda: not any(worker["load"]["num_tickets"] for worker in up.status()["workers"]))


def test_a_signal_to_every_process_stops_all_in_order(last_up: Deployed) -> None:
    """An init system signals Ray's processes as well; Ctrl-C is in test_up_stops.py."""
    assert last_up.stop(signal.SIGTERM) == 0, last_up.log
    assert last_up.log.splitlines()[-1] == "stopped"
    assert last_up.processes() == {}
