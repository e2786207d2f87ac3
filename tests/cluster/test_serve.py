"""`baton serve model.gguf`, with nothing beside the file: it answers, pools change, two signals end it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed
from tests.gguf_models import convert

pytestmark = pytest.mark.cluster

NUM_STREAMS = 4
NAME = {"model": "demo-Q8_0"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Requests of its policy take turns, so that a new worker gets some."""
    path = convert(DEMO, tmp_path_factory.mktemp("gguf") / "demo-Q8_0.gguf", "Q8_0", shards=2)
    flags = ("--port", "0", "--grpc-port", "0", "--policy", "round_robin", "--processes", "2")
    deployed = Deployed("serve", str(path), *PRECISE, *flags)
    try:
        deployed.wait_for("^serving demo-Q8_0 ")
        yield deployed
    finally:
        deployed.kill()


def workers_of(served: Deployed) -> dict[str, Any]:
    return {worker["worker_id"]: worker for worker in served.status()["workers"]}


def test_the_readmes_question_is_answered_under_the_files_name(served: Deployed) -> None:
    body = {"messages": [{"role": "user", "content": "What does `os.path.exists` do?"}], "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body | NAME, timeout=60.0)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["message"]["content"] == "Test whether a path exists.  Returns False for broken symbolic links"
    assert choice["finish_reason"] == "stop"


def test_the_files_encoding_is_shown(served: Deployed) -> None:
    assert {worker["info"]["weights"] for worker in workers_of(served).values()} == {"gguf-Q8_0, 10.41 bits a weight"}


def test_a_grammar_sees_the_files_tokens(served: Deployed) -> None:
    body = NAME | {
        "messages": [{"role": "user", "content": "Pick."}], "temperature": 0, "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pick", "schema": {"enum": ["red", "green"]}},
        },
    }  # fmt: skip
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("red", "green")


def capacity(served: Deployed) -> Any:
    return httpx.get(f"{served.url}/admin/capacity", timeout=10.0).json()


def order(served: Deployed, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/admin/capacity", json={"who": "the test", **body}, timeout=10.0)


def reached(served: Deployed) -> bool:
    view = capacity(served)
    return not view["waiting_for"] and view["changes"][-1]["state"] == "reached"


def test_workers_come_change_their_role_and_go_with_nothing_lost(served: Deployed) -> None:
    prompts = [f"{LONG}# {number}\n" for number in range(NUM_STREAMS)]
    long = NAME | {"max_tokens": 300, "ignore_eos": True}
    over = threading.Event()

    def again_and_again(prompt: str) -> set[str]:
        seen = {served.text(prompt, **long)}
        while not over.is_set():
            seen.add(served.text(prompt, **long))
        return seen

    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        expected = list(clients.map(lambda prompt: {served.text(prompt, **long)}, prompts))

    refused = order(served, kind="scale", counts={"decode": 99})
    assert (refused.status_code, "give at most" in refused.text) == (400, True)
    assert order(served, kind="scale", counts={"decode": 2}, why="to grow").status_code == 202
    served.wait_until(lambda: reached(served), timeout_s=90)
    assert sorted(workers_of(served)) == ["decode-0", "decode-1", "prefill-0"]
    [pid] = served.worker_pids("decode-1")

    for body in (
        {"kind": "flip", "worker_id": "decode-1", "role": "prefill"},
        {"kind": "flip", "worker_id": "decode-1", "role": "decode"},
        {"kind": "scale", "counts": {"decode": 1}},
    ):
        over.clear()
        with ThreadPoolExecutor(NUM_STREAMS) as clients:
            asked = [clients.submit(again_and_again, prompt) for prompt in prompts]
            try:
                served.wait_until(lambda: any(worker["load"]["num_running"] for worker in workers_of(served).values()))
                assert order(served, **body).status_code == 202
            finally:
                over.set()
            assert [query.result() for query in asked] == expected
        served.wait_until(lambda: reached(served), timeout_s=90)
        assert (pid in served.processes()) == (body["kind"] == "flip"), "a flip starts nothing and ends nothing"
    assert sorted(workers_of(served)) == ["decode-0", "prefill-0"]
    assert served.count("^decode-0: runs in process") == 1
    changes = capacity(served)["changes"]
    assert [(change["who"], change["why"], change["kind"]) for change in changes][:2] == [
        ("the test", "to grow", "scale"), ("the test", "", "flip"),
    ]  # fmt: skip


def test_a_fleet_sleeps_and_wakes_with_the_first_request(served: Deployed) -> None:
    expected = served.text(LONG, **NAME)
    assert order(served, kind="scale", counts={"prefill": 0, "decode": 0}).status_code == 202
    served.wait_until(lambda: reached(served) and not workers_of(served), timeout_s=90)
    assert not any("rank_process" in line for line in served.processes().values()), "no worker is left"

    def offers_a_wait() -> bool:  # each process learns it for itself
        ready = httpx.get(f"{served.url}/ready", timeout=10.0)
        return ready.status_code == 200 and "is served in about" in ready.text

    served.wait_until(offers_a_wait)
    assert served.text(LONG, **NAME) == expected, "the first request waits, and is served"
    assert capacity(served)["changes"][-1]["kind"] == "wake"
    assert capacity(served)["desired"]["counts"] == {"prefill": 1, "decode": 1}


def test_a_second_signal_stops_at_once_and_answers_who_waits(served: Deployed) -> None:
    """The last test of this cluster."""
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(served.complete, LONG, max_tokens=1500, ignore_eos=True, **NAME)
        served.wait_until(lambda: any(worker["load"]["num_running"] for worker in workers_of(served).values()))
        os.killpg(served.process.pid, signal.SIGINT)
        served.wait_for("^stopping")
        assert served.stop(signal.SIGINT) == 130, served.log
        assert asked.result().json()["error"]["code"] == "unavailable"
    assert served.processes() == {}
