"""Measures how long a client waits when its sequence moves to another worker with its KV.

    baton up --colocated --workers 2
    python -m benchmarks.transfer.moving                 a cluster at http://127.0.0.1:8000

Streams greedy answers, drains the worker that writes them in the middle, and compares the longest gap between tokens
with that of an undisturbed run of the same requests; the texts must be the same. Looks at a quarter of a second after
the drain: what comes later is the start of the successor, which takes a processor for some seconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from benchmarks.output import JsonFile, PlotFile, write_bars

WINDOW_S = 0.25


@dataclass(slots=True)
class ReceivedAnswer:
    """One answer: when each piece of it came. `under_way` is set with a third of it."""

    text: str = ""
    at_s: list[float] = field(default_factory=list)
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps_s(self, since_s: float) -> list[float]:
        """Those that had not ended at this time, as far as they began less than `WINDOW_S` later."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later >= since_s and earlier < since_s + WINDOW_S]


async def listen(client: httpx.AsyncClient, body: dict[str, Any], received: ReceivedAnswer) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                received.text += event["choices"][0]["text"]
                received.at_s.append(time.perf_counter())
                if len(received.at_s) == body["max_tokens"] // 3:
                    received.under_way.set()


async def ask(
    client: httpx.AsyncClient, bodies: list[dict[str, Any]], *, drain: bool
) -> tuple[list[ReceivedAnswer], float]:
    """Drains the worker that runs most of the requests once they are under way; returns the answers, and when that
    was."""
    received = [ReceivedAnswer() for _ in bodies]
    async with asyncio.TaskGroup() as tasks:
        for body, one in zip(bodies, received, strict=True):
            tasks.create_task(listen(client, body, one))
        for one in received:
            await one.under_way.wait()
        since_s = time.perf_counter()
        if drain:
            status = (await client.get("/admin/status")).json()
            busy = max(status["workers"], key=lambda worker: worker["load"]["num_running"])
            since_s = time.perf_counter()
            (await client.post(f"/admin/workers/{busy['worker_id']}/drain")).raise_for_status()
    return received, since_s


async def ready(client: httpx.AsyncClient) -> None:
    """Returns when every worker is: also the successor of one that was drained."""
    while True:
        workers = (await client.get("/admin/status")).json()["workers"]
        if all(worker["state"] == "ready" for worker in workers):
            return
        await asyncio.sleep(0.2)


async def measure(url: str, context: int, num_requests: int, max_tokens: int) -> dict[str, float]:
    """Milliseconds between the tokens a client is sent: the median gap, and the longest without and with a move."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        await ready(client)
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        prompt = [5 + i % 200 for i in range(context)]
        bodies = [
            {
                "model": model, "prompt": [*prompt, 10 + number], "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True,
            }
            for number in range(num_requests)
        ]  # fmt: skip
        calm, calm_s = await ask(client, bodies, drain=False)
        moved, moved_s = await ask(client, bodies, drain=True)
        assert [one.text for one in moved] == [one.text for one in calm], "a move changed an answer"
        await asyncio.sleep(1.0)
        await ready(client)
    median = statistics.median(gap for one in calm for gap in one.gaps_s(calm_s))
    longest = [
        statistics.median(max(one.gaps_s(since_s)) for one in run)
        for run, since_s in ((calm, calm_s), (moved, moved_s))
    ]
    names = ("gap, median", "longest, undisturbed", "longest, moved")
    return {name: 1000 * value for name, value in zip(names, (median, *longest), strict=True)}


def main(
    url: Annotated[str, typer.Option(help="The server's root.")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 300,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    typer.echo("| prompt tokens | at a time | gap, median (ms) | longest, undisturbed (ms) | longest, moved (ms) |")
    typer.echo("|---|---|---|---|---|")
    figures = {}
    for context, num_requests in ((64, 1), (1024, 1), (64, 4), (1024, 4)):
        found = asyncio.run(measure(url, context, num_requests, max_tokens))
        typer.echo(f"| {context} | {num_requests} | {' | '.join(f'{value:.1f}' for value in found.values())} |")
        figures[f"{num_requests} x {context} tokens"] = found
    write_bars(figures, unit="ms", json_file=json_file, plot=plot)


if __name__ == "__main__":
    typer.run(main)
