"""`kill -9` of any worker: those who were being answered get the rest, or are told; the worker comes back by itself."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.cluster.deployed import LONG, Deployed

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_comes_back_and_requests_are_answered(up: Deployed, victim: str) -> None:
    expected = up.text(LONG, max_tokens=200, ignore_eos=True)
    ready = rf"^worker {victim} at \S+ is ready"
    lives, meetings = up.count(rf"^{victim}: runs in process"), up.count(ready)
    [pid] = up.worker_pids(victim, life=lives)
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(up.complete, LONG, max_tokens=200, ignore_eos=True) for _ in range(8)]
        wait(asked, return_when="FIRST_COMPLETED", timeout=0.2)
        os.kill(pid, signal.SIGKILL)
        answers = [request.result() for request in asked]
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] in ("worker_lost", "no_workers", "transfer_failed")
    up.wait_for(ready, times=meetings + 1)
    assert up.worker_pids(victim, life=lives + 1) != [pid]
    assert up.text(LONG, max_tokens=200, ignore_eos=True) == expected
    up.wait_until(lambda: not any(worker["load"]["num_tickets"] for worker in up.status()["workers"]))
