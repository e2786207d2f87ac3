"""The planner beside real workers: open load comes, and goes: `python -m benchmarks.capacity.live_autoscale`.

Start a cluster that may be planned fast, and then this:

    baton up --workers 1 --autoscale 1:3 --ttft-ms 400 --tpot-ms 40 --set planner.period_s=1 \
        --set planner.settle_s=6 --set planner.manual_s=0

It prints the fleet as it changes, the errors of clients, and how long the way up and back took.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import httpx

PROMPT = "import os\n\n\ndef join(first, second):\n" + '    """Join two paths, inserting a separator."""\n' * 6
LOOK_S = 0.25


class PlannedLoad:
    """Requests that come at a rate, however long answers take."""

    def __init__(self, client: httpx.AsyncClient, model: str, num_tokens: int) -> None:
        self._client = client
        self._body = {"model": model, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        self._running: set[asyncio.Task[None]] = set()
        self.num_answers = 0
        self.errors: list[str] = []

    async def run(self, rate: float, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            task = asyncio.create_task(self._one(number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            number += 1
            await asyncio.sleep(1.0 / rate)
        await asyncio.gather(*self._running)

    async def _one(self, number: int) -> None:
        body = self._body | {"prompt": f"# {number}\n{PROMPT}"}
        response = await self._client.post("/v1/completions", json=body, timeout=300.0)
        self.num_answers += 1
        if response.status_code != 200:
            self.errors.append(f"{response.status_code}: {response.text[:200]}")


async def serving(client: httpx.AsyncClient) -> int:
    """Workers that serve. Prints new decisions."""
    return sum((await client.get("/admin/capacity")).json()["serving"].values())


async def until(client: httpx.AsyncClient, count: int, timeout_s: float) -> float | None:
    """Seconds until so many workers serve; None if that does not come."""
    begun_s, shown = time.monotonic(), -1
    while time.monotonic() - begun_s < timeout_s:
        now = await serving(client)
        if now != shown:
            sys.stdout.write(f"{time.monotonic() - begun_s:6.1f} s: {now} workers\n")
            sys.stdout.flush()
            shown = now
        if now == count:
            return time.monotonic() - begun_s
        await asyncio.sleep(LOOK_S)
    return None


async def run(url: str, rate: float, most: int, num_tokens: int, timeout_s: float) -> int:
    """The exit code."""
    over = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False, limits=httpx.Limits()) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        load = PlannedLoad(client, model, num_tokens)
        least = await serving(client)
        coming = asyncio.create_task(load.run(rate, over))
        up_s = await until(client, most, timeout_s)
        over.set()
        await coming
        down_s = await until(client, least, timeout_s)
        changes = (await client.get("/admin/capacity")).json()["changes"]
    for change in changes:
        sys.stdout.write(f"{change['number']:>3} {change['who']}: {change['after']['counts']}: {change['why']}\n")
    sys.stdout.write(f"{load.num_answers} answers, {len(load.errors)} errors; up {up_s} s, down {down_s} s\n")
    sys.stdout.write("".join(f"  {error}\n" for error in load.errors[:5]))
    return 1 if load.errors or up_s is None or down_s is None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--most", type=int, default=3, help="workers to come")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=120.0)
    chosen = parser.parse_args()
    sys.exit(asyncio.run(run(chosen.url, chosen.rate, chosen.most, chosen.tokens, chosen.timeout)))


if __name__ == "__main__":
    main()
