"""A random worker killed, or stopped, at a random moment under 16 requests of every kind: no answer is another one. Nor
is any when every worker is replaced in turn under load.

One run in every test run; `BATON_CHAOS_RUNS=200 make test ARGS=tests/cluster/test_chaos.py` makes as many as wanted.
A run is made from its number alone, but for what the machine does meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from cluster.cli.drain import drain
from tests.cluster.deployed import LONG, PRECISE, Deployed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * 3600)]

RUNS = int(os.environ.get("BATON_CHAOS_RUNS", "1"))
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WORDS = {"structured_outputs": {"regex": "([a-z]{1,9} ){100}"}}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "logprobs": 1},
    {"temperature": 0.7, "seed": 11, "top_p": 0.9, "top_k": 40, "stream": True},
    {"temperature": 0.8, "seed": 3, "n": 2, "stream": True},
    {"temperature": 0.0, "logprobs": 2, "stream": True},
    {"temperature": 0.6, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 9, "repetition_penalty": 1.2, "stream": True, "ignore_eos": False, **WORDS},
    {"temperature": 0.9, "seed": 13, "stop": ["return", "self"], "ignore_eos": False},
)


def asked(number: int) -> dict[str, Any]:
    """One of 16 requests; half of their prompts go through both pools. Of each kind one wants token ids; those of the
    other may take the short cut."""
    prompt = f"# {number}\n{LONG}" if number % 2 else f"# {number}\ndef read(path):\n"
    body = {"model": "demo", "prompt": prompt, "max_tokens": 96, "ignore_eos": True}
    return body | KINDS[number // 2] | {"return_token_ids": (number + number // 2) % 2 == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]

    def check(self, expected: Choice) -> None:
        """Logprobs depend on the batch, a little."""
        assert replace(self, logprobs=[]) == replace(expected, logprobs=[])
        assert self.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def answer(url: str, number: int) -> list[Choice]:
    body = asked(number)
    with httpx.Client(timeout=120.0) as client:
        if not body.get("stream"):
            response = client.post(f"{url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            pieces = response.json()["choices"]
        else:
            pieces = []
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        assert "error" not in chunk, chunk
                        pieces += chunk["choices"]
    choices = [whole([piece for piece in pieces if piece["index"] == index]) for index in range(body.get("n", 1))]
    for choice in choices:
        assert bool(choice.token_ids) == body["return_token_ids"]
        assert bool(choice.logprobs) == ("logprobs" in body)
    return choices


def whole(pieces: list[dict[str, Any]]) -> Choice:
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return Choice(
        text="".join(piece["text"] for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.get("token_ids", ())],
        finish_reason=next(piece["finish_reason"] for piece in pieces if piece["finish_reason"]),
        logprobs=[
            value
            for one in told
            for its, top in zip(one["token_logprobs"], one["top_logprobs"], strict=True)
            for value in (its, *sorted(top.values()))
        ],
    )


@pytest.fixture(scope="module")
def four() -> Iterator[Deployed]:
    quick = ("--set", "supervision.health_period_s=0.5", "--set", "supervision.max_failed_checks=3")
    size = ("--prefill", "2", "--decode", "2", "--port", "0", "--grpc-port", "0")
    deployed = Deployed("up", *size, *PRECISE, *quick)
    try:
        deployed.wait_for("^serving ")
        yield deployed
    finally:
        deployed.kill()


@pytest.fixture(scope="module")
def undisturbed(four: Deployed) -> list[list[Choice]]:
    return [answer(four.url, number) for number in range(16)]


@pytest.mark.parametrize("run", range(RUNS))
def test_every_answer_is_the_undisturbed_one_and_nothing_is_left(
    four: Deployed, undisturbed: list[list[Choice]], run: int
) -> None:
    chance = random.Random(run)
    victim = chance.choice(WORKERS)
    how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
    lives = four.count(rf"^{victim}: runs in process")
    [pid] = four.worker_pids(victim, life=lives)
    with ThreadPoolExecutor(16) as clients:
        answers = [clients.submit(answer, four.url, number) for number in range(16)]
        time.sleep(chance.uniform(0.0, 1.5))  # the moment is what is random here, nothing waits for it
        os.kill(pid, how)
        told = [one.result() for one in answers]
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
    while eight clients ask one thing after another."""
    over = threading.Event()

    def ask(client: int) -> int:
        number = num_asked = 0
        while not over.is_set():
            number = (client + 5 * num_asked) % 16  # every client asks all of them
            check(answer(four.url, number), undisturbed[number])
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(ask, client) for client in range(8)]
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
        counts = [one.result() for one in asking]
    print(f"{sum(counts)} requests were answered meanwhile")
    assert all(counts)
    four.wait_until(lambda: _settled(four), timeout_s=60.0)


def check(seen: list[Choice], expected: list[Choice]) -> None:
    for choice, like in zip(seen, expected, strict=True):
        choice.check(like)


def _settled(four: Deployed) -> bool:
    status = four.status()
    return bool(status["ready"]) and all(map(_idle, status["workers"]))


def _idle(worker: dict[str, Any]) -> bool:
    counts = (worker["load"][name] for name in ("num_running", "num_waiting", "num_tickets"))
    return worker["state"] == "ready" and not any(counts)
