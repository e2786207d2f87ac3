"""Whatever becomes of a worker, over HTTP: every answer of every kind is the undisturbed one, and nothing is left.

Workers whose next token depends on all that a request asks for and on every token before it: one that is lost, doubled
or changed on the way to another worker changes all that follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from zlib import crc32

import httpx
import orjson
import pytest

from protos.values import GenerateRequest, WorkerRole
from tests.unit.router.fake_cluster import Cluster, served
from tests.unit.router.fake_worker import FakeWorker

FIRST_ID, NUM_IDS = 4, 380  # tokens that say something
MADE_BEFORE = 5  # tokens of each answer when it happens
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "two choices": {"temperature": 0.8, "seed": 3, "n": 2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "of the prompt too": {"temperature": 0.5, "seed": 9, "logprobs": 1, "echo": True},
    "penalties": {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "a stop string": {"temperature": 0.9, "seed": 13, "stop": ["?"]},
    "token ids": {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": 1, "return_token_ids": True},
}
ASKED = [(kind, stream) for kind in KINDS for stream in (False, True)]


class Remembering(FakeWorker):
    def token(self, request: GenerateRequest, index: int) -> int:
        sampling = request.sampling
        seed = sampling.seed if sampling.temperature else None  # one is drawn where none is given
        asked = (request.prompt_ids, seed, sampling.temperature, sampling.presence_penalty)
        said = list(request.output_ids)
        while len(said) <= index:
            said.append(FIRST_ID + crc32(repr((asked, sampling.frequency_penalty, said)).encode()) % NUM_IDS)
        return said[index]


class Answers:
    """One of each kind, whole and streamed, at the same time."""

    def __init__(self, client: httpx.AsyncClient, stop: str) -> None:
        self._client = client
        self._stop = stop
        self.asking = [asyncio.create_task(self._ask(number)) for number in range(len(ASKED))]

    async def _ask(self, number: int) -> list[dict[str, Any]]:
        kind, stream = ASKED[number]
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(range(100 + number // 2, 112 + number // 2)),
            "max_tokens": 16,
            "stream": stream,
        }
        body |= KINDS[kind] | ({"stop": [self._stop]} if "stop" in KINDS[kind] else {})
        answer = await self._client.post("/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        if not stream:
            chunks = [answer.json()]
        else:
            *events, done = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
            assert done == "[DONE]", answer.text
            chunks = [orjson.loads(event) for event in events if not event.startswith(":")]
        pieces = [piece for chunk in chunks for piece in chunk["choices"]]
        return [whole([piece for piece in pieces if piece["index"] == index]) for index in range(body.get("n", 1))]

    async def all(self) -> dict[str, list[dict[str, Any]]]:
        told = await asyncio.gather(*self.asking)
        return {
            f"{kind}, {'streamed' if stream else 'whole'}": choice
            for (kind, stream), choice in zip(ASKED, told, strict=True)
        }


def whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """All parts of a choice that a client keeps."""
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "token_ids": [value for piece in pieces for value in piece.get("token_ids") or ()],
        "logprobs": {name: [value for part in logprobs for value in part[name]] for name in (logprobs or [{}])[0]},
        "finish_reason": [piece["finish_reason"] for piece in pieces if piece["finish_reason"]],
    }


def num_jobs() -> int:
    return sum(KINDS[kind].get("n", 1) for kind, _ in ASKED)


async def until_all_wait(cluster: Cluster, role: WorkerRole, num_made: int) -> None:
    """Every job is on a worker of that role, and goes no further."""
    workers = [worker for worker in cluster.workers.values() if worker.role is role]

    def wait() -> bool:
        running = [sequence for worker in workers for sequence in worker.running.values()]
        return len(running) == num_jobs() and all(sequence.num_made == num_made for sequence in running)

    waiting = [asyncio.create_task(worker.until(wait)) for worker in workers]  # the last to get there notices
    done, pending = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


async def dies(cluster: Cluster, worker_id: str) -> None:
    await cluster[worker_id].die()


async def hangs(cluster: Cluster, worker_id: str) -> None:
    """The worker is stopped as by SIGSTOP: no message and no sign of health."""
    cluster[worker_id].healthy = False


async def drains(cluster: Cluster, worker_id: str) -> None:
    cluster[worker_id].says_when_moving = 2
    cluster[worker_id].drain()


async def loses_kv(cluster: Cluster, worker_id: str) -> None:
    cluster[worker_id].loses_kv = True
    cluster[worker_id].go()


PAIRS = ("p0", "p1", "d0", "d1")


@pytest.mark.parametrize(
    ("shape", "victim", "happens"),
    [
        (PAIRS, "d0", dies),
        (PAIRS, "d0", hangs),
        (PAIRS, "d0", drains),
        (PAIRS, "p0", dies),
        (PAIRS, "p0", loses_kv),
        (("c0", "c1"), "c0", drains),
    ],
)
async def test_every_kind_of_answer_is_the_undisturbed_one(
    make: Callable[..., Cluster],
    shape: tuple[str, ...],
    victim: str,
    happens: Callable[[Cluster, str], Any],
) -> None:
    cluster = make(kind=Remembering, local_prefill_tokens=0, health_period_s=0.02, max_worker_crashes=100)
    await cluster.add(*shape)
    role = cluster[victim].role
    async with served(cluster) as client:
        said = (await Answers(client, "?").all())["a stop string, whole"][0]["text"]
        stop = said[len(said) * 2 // 3 :][:3]
        undisturbed = await Answers(client, stop).all()
        assert undisturbed["a stop string, streamed"][0]["finish_reason"] == ["stop"]
        beside = [worker for worker in cluster.workers.values() if worker.role is role]
        num_made = 0 if role is WorkerRole.PREFILL else MADE_BEFORE
        for worker in beside:
            worker.pause_after = num_made
        answers = Answers(client, stop)
        await until_all_wait(cluster, role, num_made)
        others = [worker for worker in beside if worker is not cluster[victim]]
        for worker in others:
            worker.go()
        await happens(cluster, victim)
        if happens is drains:
            await cluster.until(lambda: cluster.state(victim) == "draining")
            cluster[victim].go(MADE_BEFORE + 1)
        assert await answers.all() == undisturbed
    for worker in cluster.workers.values():
        if worker.worker_id != victim or happens is drains:
            await worker.until(lambda worker=worker: not worker.running and not worker.tickets)  # type: ignore[misc]
    assert all(status.num_routed == 0 for status in cluster.fleet.status())
