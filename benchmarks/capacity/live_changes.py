"""Random resizes and flips of a running cluster under streams: `python -m benchmarks.capacity.live_changes`.

Start one with `baton up --set worker.dtype=float32`: answers are compared with those of the undisturbed cluster, text
for text. At the end nothing may run, and no ticket may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.capacity.streams import whole_text
from benchmarks.output import write_figures

MOST = {"prefill": 2, "decode": 3}
PROMPT = "import os\n\n\ndef join(first, second):\n" + '    """Join two paths, inserting a separator."""\n' * 12


class ComparedStreams:
    """As many clients, each with one request after another, and every answer compared with the expected one."""

    def __init__(self, client: httpx.AsyncClient, model: str, num_tokens: int) -> None:
        self._client = client
        self._body = {"model": model, "max_tokens": num_tokens, "temperature": 0.0}
        self._expected: dict[int, str] = {}
        self.num_answers = 0
        self.errors: list[str] = []

    async def text(self, number: int) -> str:
        body = self._body | {"prompt": f"{PROMPT}# {number}\n"}
        try:
            return await whole_text(self._client, body)
        except (ValueError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"

    async def learn(self, count: int) -> None:
        """The answers of the undisturbed cluster."""
        texts = await asyncio.gather(*(self.text(number) for number in range(count)))
        self._expected = dict(enumerate(texts))

    async def run(self, number: int, over: asyncio.Event) -> None:
        while not over.is_set():
            text = await self.text(number)
            self.num_answers += 1
            if text != self._expected[number]:
                self.errors.append(f"client {number}: {text[:200]!r}")


async def change(client: httpx.AsyncClient, rng: random.Random) -> tuple[dict[str, Any], float] | None:
    """A random order, and the seconds until it is reached; None for one that is refused, or changes nothing."""
    order: dict[str, Any] = {"kind": "scale", "who": "live_changes"}
    if rng.random() < 0.6:
        workers = (await client.get("/admin/status")).json()["workers"]
        roles = {one["worker_id"]: one["info"]["role"] for one in workers if one["info"]}
        worker_id = rng.choice(sorted(roles))
        other = "decode" if roles[worker_id] == "prefill" else "prefill"
        order |= {"kind": "flip", "worker_id": worker_id, "role": other}
    else:
        order["counts"] = {role: rng.randint(int(role == "decode"), most) for role, most in MOST.items()}
    begun_s = time.monotonic()
    response = await client.post("/admin/capacity", json=order, timeout=60.0)
    if response.status_code != 202 or not response.json()["number"]:
        return None
    number = response.json()["number"]
    while True:
        report: Mapping[str, Any] = (await client.get("/admin/capacity")).json()
        state = next(one["state"] for one in report["changes"] if one["number"] == number)
        if state != "under way":
            assert state == "reached", f"{order}: {state}: {report}"
            return order, time.monotonic() - begun_s
        await asyncio.sleep(0.1)


async def left_behind(client: httpx.AsyncClient) -> str:
    """What is still held when nothing is requested any more; "" for nothing."""
    for _ in range(100):
        status, kv = (await client.get("/admin/status")).json(), (await client.get("/admin/kv")).json()
        running = sum(one["load"]["num_running"] + one["load"]["num_waiting"] for one in status["workers"])
        if not running and not kv["num_tickets"]:
            return ""
        await asyncio.sleep(0.1)
    return f"{running} requests and {kv['num_tickets']} tickets"


async def run(url: str, num_changes: int, num_streams: int, num_tokens: int, seed: int, json_file: Path | None) -> int:
    """The exit code."""
    rng, over = random.Random(seed), asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        streams = ComparedStreams(client, model, num_tokens)
        await streams.learn(num_streams)
        clients = [asyncio.create_task(streams.run(number, over)) for number in range(num_streams)]
        made: list[dict[str, Any]] = []
        while len(made) < num_changes:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            if (done := await change(client, rng)) is not None:
                order, seconds = done
                what = order.get("counts") or f"{order['worker_id']} -> {order['role']}"
                made.append({"kind": order["kind"], "what": what, "seconds": round(seconds, 2)})
                sys.stdout.write(f"{len(made):>3} {order['kind']} {what}: {seconds:.1f} s\n")
        over.set()
        await asyncio.gather(*clients)
        left = await left_behind(client)
    sys.stdout.write(f"{len(made)} changes, {streams.num_answers} answers, {len(streams.errors)} wrong or failed\n")
    sys.stdout.write("".join(f"  {error}\n" for error in streams.errors) + (f"left behind: {left}\n" if left else ""))
    write_figures(
        json_file, num_answers=streams.num_answers, num_wrong=len(streams.errors), left_behind=left, changes=made
    )
    return 1 if streams.errors or left else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    sys.exit(asyncio.run(run(chosen.url, chosen.changes, chosen.streams, chosen.tokens, chosen.seed, chosen.json)))


if __name__ == "__main__":
    main()
