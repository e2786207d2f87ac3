"""A running cluster whose processes are killed under a batch and clients: has each line one result, and does the ledger
say what clients received?

    python -m benchmarks.batches.live_kills --lines 5000 --requests 1000 --kills 50

`baton up` serves the demo model with two gateway processes, a prefill and two decode workers. A gateway process, a
worker or the driver of Ray is ended by SIGKILL again and again, each time that all workers are ready. Meanwhile clients
ask one thing after another: streamed or not, one choice or two, with and without stop strings, and some hang up. The
row of a request whose client got its usage must say that usage. Only an answer that ended within LOST_S before a
gateway process was killed may have no row: these are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.output import write_figures

MARK = "BATON_LIVE_KILLS"
KINDS = {"gateway": "cluster.gateway.replica ", "driver": "cluster.ray.driver ", "worker": ""}
FLEET = ("--prefill", "1", "--decode", "2", "--processes", "2", "--grpc-port", "0")
QUICK = ("--set", "supervision.health_period_s=1")
OVER = ("completed", "failed", "expired", "cancelled")
HEALED_S = 120.0
LOST_S = 0.1  # between the last byte of an answer and its row


class KilledCluster:
    """`baton up` in a folder, and whatever it starts."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._mark = uuid.uuid4().hex
        self._log = folder / "log"
        where = (
            "--set",
            f"router.ledger.path={folder / 'ledger.db'}",
            "--set",
            f"router.batch.folder={folder / 'batches'}",
        )
        command = [sys.executable, "-c", "from cluster.cli.main import main; main()", "up", *FLEET, *QUICK, *where]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port), "--log-format", "json"],
                env=os.environ | {MARK: self._mark}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def pids(self, kind: str) -> list[int]:
        """Processes of a kind of KINDS."""
        if kind == "worker":
            told = re.findall(r'"(?:prefill|decode)-\d+: runs in process (\d+)"', self._log.read_text())
            return [int(pid) for pid in told if int(pid) in self._running()]
        return [pid for pid, command in self._running().items() if KINDS[kind] in command]

    def _running(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    async def healed(self, client: httpx.AsyncClient) -> None:
        """Returns when every worker is ready. Raises TimeoutError."""
        async with asyncio.timeout(HEALED_S):
            while True:
                with suppress(httpx.HTTPError):
                    status = (await client.get(f"{self.url}/admin/status", timeout=5.0)).json()
                    if [one["state"] for one in status["workers"]] == ["ready"] * 3 and not status["degraded"]:
                        return
                await asyncio.sleep(0.2)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(60)
        finally:
            for pid in self._running():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass(slots=True)
class KillsToll:
    """What clients saw: (prompt, completion) tokens of each whole answer by its id, when it ended, and ids of broken
    ones. Times are those of time.monotonic.
    """

    answered: dict[str, tuple[int, int]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    gateway_kills_s: list[float] = field(default_factory=list)

    def may_be_lost(self, name: str) -> bool:
        """Whether a gateway process was killed within LOST_S of this answer's end."""
        return any(abs(kill_s - self.ended_s[name]) <= LOST_S for kill_s in self.gateway_kills_s)


async def ask(client: httpx.AsyncClient, url: str, number: int, chance: random.Random, toll: KillsToll) -> None:
    """One request, whatever comes of it."""
    name = ""
    content = f"{chance.choice(('join two paths', 'sort a list'))} {number % 7} " * 4
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": chance.randint(4, 60), "ignore_eos": True, "n": chance.choice((1, 1, 2)),
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    most = body["max_tokens"] * body["n"]
    if chance.random() < 0.2:
        body |= {"stop": ["e"], "ignore_eos": False}
    streams, hangs_up = chance.random() < 0.6, chance.random() < 0.1
    path, usage = f"{url}/v1/chat/completions", None
    try:
        if not streams:
            answer = await client.post(path, json=body)
            if answer.status_code != 200:
                toll.refused[answer.json()["error"]["code"]] += 1
                return
            name, usage = answer.json()["id"], answer.json()["usage"]
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    toll.refused[answer.json()["error"]["code"]] += 1
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        piece = json.loads(line.removeprefix("data: "))
                        if "error" in piece:
                            toll.refused[piece["error"]["code"]] += 1
                            return
                        name, usage = piece["id"], piece.get("usage")
                        if hangs_up:
                            break
    except httpx.TransportError:
        pass
    if usage is None:
        toll.broken[name or f"before its first piece, {number}"] = most
    else:
        toll.answered[name] = usage["prompt_tokens"], usage["completion_tokens"]
        toll.ended_s[name] = time.monotonic()


async def upload(client: httpx.AsyncClient, url: str, num_lines: int) -> str:
    """The id of a batch of so many lines."""
    content = ""
    for number in range(num_lines):
        body = {"model": "demo", "max_tokens": 24, "messages": [{"role": "user", "content": f"list {number % 20}"}]}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        content += f"{json.dumps(line)}\n"
    sent = await client.post(f"{url}/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    order = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = await client.post(f"{url}/v1/batches", json=order)
    made.raise_for_status()
    return str(made.json()["id"])


async def retried(client: httpx.AsyncClient, url: str) -> Any:
    """The answer of a gateway that may just have been killed."""
    while True:
        with suppress(httpx.TransportError):
            answer = await client.get(url, timeout=10.0)
            if answer.status_code == 200:
                return answer
        await asyncio.sleep(0.2)


async def run(cluster: KilledCluster, args: argparse.Namespace, toll: KillsToll) -> Counter[str]:
    """How often each line of the batch has a result."""
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        await cluster.healed(client)
        batch = await upload(client, cluster.url, args.lines)
        numbers, chance = itertools.count(), random.Random(args.seed)

        async def clients() -> None:
            while (number := next(numbers)) < args.requests or toll.kills.total() < args.kills:
                await ask(client, cluster.url, number, random.Random(f"{args.seed} {number}"), toll)

        asking = [asyncio.create_task(clients()) for _ in range(args.clients)]
        while toll.kills.total() < args.kills:
            await cluster.healed(client)
            await asyncio.sleep(chance.uniform(0.0, args.pause))  # the moment is what is random
            kind = chance.choice(sorted(KINDS))
            if pids := cluster.pids(kind):
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    toll.kills[kind] += 1
                    if kind == "gateway":
                        toll.gateway_kills_s.append(time.monotonic())
                    told = (await retried(client, f"{cluster.url}/v1/batches/{batch}")).json()["request_counts"]
                    sys.stdout.write(
                        f"{toll.kills.total():>3} {kind}: {len(toll.answered)} answers, {told['completed']} lines\n"
                    )
                    sys.stdout.flush()
        await asyncio.gather(*asking)
        await cluster.healed(client)
        while True:
            found = (await retried(client, f"{cluster.url}/v1/batches/{batch}")).json()
            if found["status"] in OVER:
                break
            await asyncio.sleep(0.5)
        sys.stdout.write(f"batch {found['status']}: {found['request_counts']}\n")
        seen: Counter[str] = Counter()
        for file_id in filter(None, (found["output_file_id"], found["error_file_id"])):
            content = (await retried(client, f"{cluster.url}/v1/files/{file_id}/content")).text
            seen.update(json.loads(line)["custom_id"] for line in content.splitlines())
        await asyncio.sleep(args.settle)  # until the requests of killed processes are found by others
    return seen


def compare(ledger: Path, toll: KillsToll) -> tuple[int, int, list[str]]:
    """How many whole answers have no row, how many broken ones have one, and what is wrong: rows that say otherwise
    than clients do, and missing rows that no kill explains.
    """
    with closing(sqlite3.connect(ledger)) as database:
        query = "SELECT request_id, input_tokens + cached_tokens, output_tokens FROM requests"
        rows = {str(name): (int(read), int(written)) for name, read, written in database.execute(query)}
    kept = {name: rows[name] for name in toll.answered if name in rows}
    found = {name: rows[name] for name in toll.broken if name in rows}
    wrong = [f"{name}: {row}, not {toll.answered[name]}" for name, row in kept.items() if row != toll.answered[name]]
    wrong += [
        f"{name}: {row} of {toll.broken[name]} at most" for name, row in found.items() if row[1] > toll.broken[name]
    ]
    lost = [name for name in toll.answered if name not in rows]
    wrong += [f"{name}: no row, and no gateway was killed then" for name in lost if not toll.may_be_lost(name)]
    sys.stdout.write(
        f"ledger: {len(toll.answered)} whole answers, {sum(one for _, one in toll.answered.values())} tokens: "
        f"{len(lost)} without a row, {len(wrong)} differences; {len(toll.broken)} broken or hung up, "
        f"{len(found)} of them found\n"
    )
    return len(lost), len(found), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=1000, help="at least")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between a healed cluster and a kill, at most")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds at the end, for what killed processes left")
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    toll, begun_s = KillsToll(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cluster = KilledCluster(Path(folder), args.port)
        try:
            seen = asyncio.run(run(cluster, args, toll))
        finally:
            cluster.stop()
        lost, found, wrong = compare(Path(folder) / "ledger.db", toll)
    missing, doubled = args.lines - len(seen), sum(count > 1 for count in seen.values())
    sys.stdout.write(
        f"{toll.kills.total()} kills {dict(toll.kills)}, {time.monotonic() - begun_s:.0f} s: lines {missing} missing, "
        f"{doubled} twice; refused {dict(toll.refused)}\n" + "".join(f"  {one}\n" for one in wrong)
    )
    write_figures(
        args.json, kills=toll.kills, lines=args.lines, missing=missing, doubled=doubled, refused=toll.refused,
        answers=len(toll.answered), tokens=sum(one for _, one in toll.answered.values()), broken=len(toll.broken),
        broken_with_a_row=found, without_a_row=lost, differences=wrong,
    )  # fmt: skip
    sys.exit(1 if missing or doubled or wrong else 0)


if __name__ == "__main__":
    main()
