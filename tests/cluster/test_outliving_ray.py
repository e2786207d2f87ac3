"""Ray's processes, its driver, gateway processes and workers are killed, or stand still, under seeded requests: no
answer changes, none lacks its end, and the cluster heals by itself without a restart of the workers that live.

A few kills in every test run; `BATON_RAY_KILLS=100 make test ARGS="-s tests/cluster/test_outliving_ray.py"` makes 100,
of random kinds at random moments, and prints what came of them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import Deployed
from tests.cluster.seeded import NUM_REQUESTS, Choice, answer, check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * 3600)]

KILLS = int(os.environ.get("BATON_RAY_KILLS", "4"))
EACH = 2 if KILLS > 4 else 1  # requests of a client
SERVES_S = 60.0
HEALED_S = 100.0  # on an otherwise idle machine it takes some ten
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROCESSES = {
    "gcs": "gcs_server ",
    "raylet": "raylet/raylet ",
    "driver": "cluster.ray.driver ",
    "daemon": "DashboardAgent|RuntimeEnvAgent",
    "gateway": "cluster.gateway.replica ",
}
FROZEN = "frozen "
KINDS = (*PROCESSES, "worker", *(f"{FROZEN}{kind}" for kind in ("gcs", "raylet", "driver")))
"""SIGKILL of one process of a kind, or SIGSTOP."""
FIRST = (("gcs", "worker"), ("driver", "gateway"))
"""The first rounds kill these, one right after the other; later ones up to three of KINDS, with pauses."""
MAX_PAUSE_S = 4.0


def rounds() -> Iterator[tuple[str, ...]]:
    """`KILLS` kills in all, or a few more."""
    num_kills, chance = 0, random.Random(KILLS)
    for first in FIRST:
        yield first
        num_kills += len(first)
    while num_kills < KILLS:
        kinds = tuple(chance.choices(KINDS, k=chance.randint(1, 3)))
        yield kinds
        num_kills += len(kinds)


@dataclass(slots=True)
class Toll:
    kills: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    num_broken: int = 0
    serves_s: float = 0.0
    healed_s: float = 0.0


@pytest.fixture(scope="module")
def toll() -> Iterator[Toll]:
    made = Toll()
    yield made
    print(f"\n{made.kills.total()} kills ({dict(made.kills)}), {made.num_answers} answers as without kills, "
          f"{made.num_broken} broken with their gateway process, served again after {made.serves_s:.1f} s at most, all "
          f"as before after {made.healed_s:.1f} s at most")  # fmt: skip


class Asking:
    """Clients, each of which asks one thing after another."""

    def __init__(self, url: str, undisturbed: list[list[Choice]], *, may_break: bool) -> None:
        self._url = url
        self._undisturbed = undisturbed
        self._may_break = may_break
        self._pool = ThreadPoolExecutor(NUM_REQUESTS)
        self._clients = [self._pool.submit(self._ask, client) for client in range(NUM_REQUESTS)]

    def _ask(self, client: int) -> tuple[int, int]:
        """How many were answered, and how many connections broke."""
        num_asked = num_broken = 0
        for _ in range(EACH):
            number = (client + 5 * (num_asked + num_broken)) % NUM_REQUESTS
            try:
                seen = answer(self._url, number)
            except httpx.TransportError:
                if not self._may_break:
                    raise
                num_broken += 1
                continue
            check(seen, self._undisturbed[number])
            num_asked += 1
        return num_asked, num_broken

    def answered(self) -> tuple[int, int]:
        """Raises the first error of a client."""
        counts = [client.result() for client in self._clients]
        self._pool.shutdown()
        return sum(asked for asked, _ in counts), sum(broken for _, broken in counts)


@pytest.mark.parametrize(("number", "kinds"), [*enumerate(rounds())])
def test_killed_processes_change_no_answer_and_the_cluster_heals(
    four: Deployed, undisturbed: list[list[Choice]], toll: Toll, number: int, kinds: Sequence[str]
) -> None:
    chance = random.Random(number)
    before = serving_pids(four)
    killed: list[int] = []
    asking = Asking(four.url, undisturbed, may_break="gateway" in kinds)
    try:
        for kind in kinds:
            at_once = number < len(FIRST) and bool(killed)
            time.sleep(0.0 if at_once else chance.uniform(0.0, MAX_PAUSE_S))  # random moments: nothing waits for them
            killed.append(kill(four, kind, before, chance))
            toll.kills[kind] += 1
        begun_s = time.monotonic()
        told = trouble(four, lambda told: "workers keep serving" in told or number >= len(FIRST))
        serves(four)
        serves_s = time.monotonic() - begun_s
    finally:
        num_answers, num_broken = asking.answered()
    four.wait_until(lambda: healed(four, killed), timeout_s=HEALED_S)
    healed_s = time.monotonic() - begun_s
    print(f"{kinds}: told {told!r}, served after {serves_s:.1f} s, healed after {healed_s:.1f} s, {num_answers} "
          f"answers, {num_broken} broken with their gateway process")  # fmt: skip
    toll.num_answers, toll.num_broken = toll.num_answers + num_answers, toll.num_broken + num_broken
    toll.serves_s, toll.healed_s = max(toll.serves_s, serves_s), max(toll.healed_s, healed_s)
    assert num_answers
    after = serving_pids(four)
    assert {name for name in WORKERS if after[name] != before[name]} == {
        name for name in WORKERS if before[name] in killed
    }, "only those killed start anew"


def test_a_hung_ray_is_named_until_it_answers_or_is_given_up(four: Deployed, undisturbed: list[list[Choice]]) -> None:
    before, chance = serving_pids(four), random.Random(0)
    asking = Asking(four.url, undisturbed, may_break=False)
    try:
        store = kill(four, f"{FROZEN}gcs", before, chance)
        trouble(four, lambda told: told.startswith("Ray's control store (GCS) does not answer (for "))
        os.kill(store, signal.SIGCONT)
        trouble(four, lambda told: not told)
        raylet = kill(four, f"{FROZEN}raylet", before, chance)
        trouble(four, lambda told: told.startswith("Ray's raylet does not answer (for "))
        trouble(four, lambda told: told.startswith("Ray's raylet has not answered for 15 s (for "))
    finally:
        num_answers, _ = asking.answered()
    assert num_answers == NUM_REQUESTS * EACH
    four.wait_until(lambda: healed(four, [raylet]), timeout_s=HEALED_S)
    assert store not in four.processes()
    assert serving_pids(four) == before


def test_a_worker_killed_after_recovery_is_restarted(four: Deployed) -> None:
    launches = four.count("^decode-0: runs in process")
    killed = serving_pids(four)["decode-0"]
    os.kill(killed, signal.SIGKILL)
    four.worker_pids("decode-0", life=launches + 1)
    four.wait_until(lambda: healed(four, [killed]), timeout_s=HEALED_S)


def test_a_killed_cluster_leaves_nothing(last_four: Deployed) -> None:
    """Workers and Ray end with the process that has started it all."""
    os.kill(last_four.process.pid, signal.SIGKILL)
    last_four.wait_until(lambda: last_four.processes() == {}, timeout_s=HEALED_S)


def kill(four: Deployed, kind: str, workers: Mapping[str, int], chance: random.Random) -> int:
    """Returns the process id, once a process exists after the last kill."""
    number, kind = (signal.SIGSTOP if kind.startswith(FROZEN) else signal.SIGKILL), kind.removeprefix(FROZEN)
    deadline = time.monotonic() + HEALED_S
    while True:
        running = four.processes()
        if kind == "worker":
            pids = [pid for pid in {*workers.values(), *serving_pids(four).values()} if pid in running]
        else:
            pids = [pid for pid, command in running.items() if re.search(PROCESSES[kind], command)]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(pid := chance.choice(sorted(pids)), number)
                return pid
        assert time.monotonic() < deadline, f"no process of {kind}: {running}"


def trouble(four: Deployed, holds: Callable[[str], bool]) -> str:
    """The `degraded` of `/ready` and `/admin/status`, as soon as it `holds`: within seconds."""
    deadline = time.monotonic() + 60.0
    while True:
        told = str(ready(four)["degraded"])
        if holds(told) and holds(status(four)["degraded"]):
            return told
        assert time.monotonic() < deadline, f"`degraded` is {told!r}:\n{four.log}"


def serves(four: Deployed) -> None:
    """Returns when a new request is answered."""
    deadline = time.monotonic() + SERVES_S
    while True:
        with suppress(httpx.TransportError):
            if four.complete("import os", max_tokens=2).status_code == 200:
                return
        assert time.monotonic() < deadline, f"nothing is served after {SERVES_S} s:\n{four.log}"


def healed(four: Deployed, killed: Sequence[int]) -> bool:
    told = ready(four)
    if not told["ready"] or told["degraded"]:
        return False
    pids = set(serving_pids(four).values())
    return len(pids) == len(WORKERS) and not pids & set(killed)


def serving_pids(four: Deployed) -> dict[str, int]:
    """The processes of the workers that are ready."""
    workers = status(four)["workers"]
    return {worker["worker_id"]: worker["info"]["process_id"] for worker in workers if worker["state"] == "ready"}


def status(four: Deployed) -> Any:
    while True:
        with suppress(httpx.TransportError):
            return four.status()


def ready(four: Deployed) -> dict[str, object]:
    """The answer of `/ready` of any live gateway process."""
    while True:
        with suppress(httpx.TransportError):  # its process was killed just now
            told: dict[str, object] = httpx.get(f"{four.url}/ready", timeout=10.0).json()
            return told
