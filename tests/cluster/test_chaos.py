"""A random worker killed, or stopped, at a random moment under 16 requests of every kind: no answer is another one. Nor
is any when every worker is replaced in turn under load. The workers speculate; the undisturbed answers are without.

One run in every test run; `BATON_CHAOS_RUNS=200 make test ARGS=tests/cluster/test_chaos.py` makes as many as wanted,
and `BATON_CHAOS_MODEL=windows` or `latent` has them of a random model that keeps another cache.
A run is made from its number alone, but for what the machine does meanwhile.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cluster.cli.change.drain_verb import drain
from tests.cluster.deployed import Deployed
from tests.cluster.seeded import NUM_REQUESTS, Choice, answer, check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * 3600)]

RUNS = int(os.environ.get("BATON_CHAOS_RUNS", "1"))
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.mark.parametrize("run", range(RUNS))
def test_every_answer_is_the_undisturbed_one_and_nothing_is_left(
    four: Deployed, undisturbed: list[list[Choice]], run: int
) -> None:
    chance = random.Random(run)
    victim = chance.choice(WORKERS)
    how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
    lives = four.count(rf"^{victim}: runs in process")
    [pid] = four.worker_pids(victim, life=lives)
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        answers = [clients.submit(answer, four.url, number) for number in range(NUM_REQUESTS)]
        time.sleep(chance.uniform(0.0, 1.0))  # the moment is what is random here, nothing waits for it
        os.kill(pid, how)
        told = [output.result() for output in answers]
    for number, (seen, expected) in enumerate(zip(told, undisturbed, strict=True)):
        print(f"request {number} of run {run}: {victim}, {how.name}")  # pytest shows it of a failure
        check(seen, expected)
    four.worker_pids(victim, life=lives + 1)
    four.wait_until(lambda: _settled(four), timeout_s=60.0)


@pytest.mark.parametrize("how", ["drained", *(["killed"] if RUNS > 1 else [])])
def test_workers_are_replaced_in_turn_and_no_request_fails(
    four: Deployed, undisturbed: list[list[Choice]], how: str
) -> None:
    """`baton drain WORKER --replaced` of every worker (of one in each pool, when there is one run only), or SIGKILL,
    while four clients ask one thing after another."""
    over = threading.Event()

    def ask(client: int) -> int:
        number = num_asked = 0
        while not over.is_set():
            number = (client + 5 * num_asked) % NUM_REQUESTS  # every client asks all of them
            check(answer(four.url, number), undisturbed[number])
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(4) as clients:  # more would take the CPU from workers that start
        asking = [clients.submit(ask, client) for client in range(4)]
        try:
            for worker_id in WORKERS if RUNS > 1 else WORKERS[::2]:
                lives = four.count(rf"^{worker_id}: runs in process")
                if how == "drained":
                    drain(worker_id, url=four.url, replaced=True, timeout_s=100.0)
                else:
                    ready = four.count(rf"^worker {worker_id} at \S+ is ready")
                    os.kill(four.worker_pids(worker_id, life=lives)[0], signal.SIGKILL)
                    four.wait_for(rf"^worker {worker_id} at \S+ is ready", times=ready + 1)
                assert four.count(rf"^{worker_id}: runs in process") == lives + 1
        finally:
            over.set()
        counts = [task.result() for task in asking]
    print(f"{sum(counts)} requests were answered meanwhile")
    assert all(counts)
    told = httpx.get(f"{four.urls[0]}/metrics", timeout=10.0).text
    accepted = re.findall(r'^baton_pool_speculation_accepted_total\{pool="decode".*\} (\S+)$', told, re.MULTILINE)
    assert sum(map(float, accepted)) > 0, "nothing speculated"
    four.wait_until(lambda: _settled(four), timeout_s=60.0)


def _settled(four: Deployed) -> bool:
    status = four.status()
    return bool(status["ready"]) and all(map(_idle, status["workers"]))


def _idle(worker: dict[str, Any]) -> bool:
    counts = (worker["load"][name] for name in ("num_running", "num_waiting", "num_tickets"))
    return worker["state"] == "ready" and not any(counts)
