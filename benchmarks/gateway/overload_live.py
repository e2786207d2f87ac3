"""Measures the goodput of a running cluster under up to three times the load that it can serve.

    python -m benchmarks.gateway.overload_live                                 starts `baton up`, measures, and stops it
    python -m benchmarks.gateway.overload_live --json f.json --plot f.svg --baton="--colocated --workers 2"
    python -m benchmarks.gateway.overload_live --url http://127.0.0.1:8000      a cluster that runs
    python -m benchmarks.gateway.overload_live --paced 2                        workers that wait instead of computing

It does over HTTP what `benchmarks.gateway.overload` simulates. Capacity is measured first, as answers a second with
enough patient clients that requests always wait. Load client and cluster share the machine, so CPU time for sending
and refusing requests is missing for answers. `--paced` avoids that: gateway, client and protocol are real, and a
worker's steps take the time of a model without computing.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Annotated
from zlib import crc32

import typer
from rich.console import Console

from benchmarks.gateway.overload import FORMAT, Curve, RatePoint, plot, point_of, table
from benchmarks.gateway.router import gateway, worker_process
from benchmarks.output import JsonFile, PlotFile, write_figures
from cluster.bench.bench_load import Lengths, synthetic, with_poisson_arrivals, without_arrivals
from cluster.bench.bench_report import RequestRecord
from cluster.bench.bench_verb import BenchTarget, find_target
from cluster.bench.client import CompletionClient
from cluster.bench.http import HttpEndpoint
from cluster.bench.load import run_load
from cluster.bench.prompts import Prompts
from protos.errors import Unavailable

MULTIPLES = (1.0, 2.0, 3.0)
START_S = 120.0
TIMEOUT_S = 120.0
PROBE_TOKENS = 16
REST_S = 1.0  # between rates, for what runs to end and for lateness to be forgotten


class Site:
    """A cluster and its load."""

    def __init__(self, target: BenchTarget, prompts: Lengths, outputs: Lengths, ttft_s: float) -> None:
        self._target = target
        self._prompts = prompts
        self._outputs = outputs
        self.ttft_s = ttft_s

    async def capacity(self, *, num_requests: int, at_once: int) -> float:
        """Answers a second while no request is refused, from the first third of them to the last."""
        records = await self._run(num_requests, seed=0, at_once=at_once)
        if failed := [record.message for record in records if record.error]:
            raise Unavailable(f"{len(failed)} of {num_requests} patient requests failed, one with: {failed[0]}")
        ended = sorted(record.arrivals_s[-1] for record in records)
        low = len(ended) // 3
        return (len(ended) - 1 - low) / (ended[-1] - ended[low])

    async def point(self, multiple: float, capacity: float, seconds: float, seed: int) -> RatePoint:
        rate = multiple * capacity
        records = await self._run(max(2, int(rate * seconds)), seed=seed, rate=rate)
        await asyncio.sleep(REST_S)
        return point_of(records, multiple=multiple, seed=seed, ttft_s=self.ttft_s)

    async def _run(
        self, num_requests: int, *, seed: int, rate: float | None = None, at_once: int | None = None
    ) -> Sequence[RequestRecord]:
        """Prompts of every run are new ones: nothing is found cached."""
        items = synthetic(num_requests, prompts=self._prompts, outputs=self._outputs, seed=seed)
        items = without_arrivals(items) if rate is None else with_poisson_arrivals(items, rate, seed)
        key = f"{seed} {rate} {at_once}"
        client = CompletionClient(
            HttpEndpoint.parse(self._target.url),
            model=self._target.model.name,
            prompts=Prompts(seed=crc32(key.encode()), vocab_size=self._target.vocab_size),
            timeout_s=TIMEOUT_S,
            further={} if rate is None else {"max_ttft_ms": self.ttft_s * 1000},
        )
        try:
            await client.learn(PROBE_TOKENS)
            return await run_load(items, client, concurrency=at_once)
        finally:
            client.close()


@contextmanager
def running(flags: str) -> Iterator[str]:
    """The URL of a `baton up` of our own; its log is shown when it does not start."""
    program = [
        sys.executable,
        "-c",
        "from cluster.cli.main import main; main()",
        "up",
        "--port",
        "0",
        *shlex.split(flags),
    ]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines: list[str] = []
    found: list[str] = []
    served = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"serving \S+ at (http://\S+), gRPC", line):
                found.append(match[1])
                served.set()
        served.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        served.wait(START_S)
        if not found:
            raise Unavailable("baton up did not start:\n" + "".join(lines[-20:]))
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def paced(count: int) -> Iterator[str]:
    """The URL of a `baton gateway` with `num_workers` workers that wait instead of computing."""
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(worker_process("benchmarks.gateway.paced_worker", "--name", f"paced-{number}"))
            for number in range(count)
        ]
        further = [word for address in addresses[1:] for word in ("--worker", address)]
        url, _ = stack.enter_context(gateway(addresses[0], *further))
        yield url


async def measure(
    site: Site, name: str, *, seconds: float, seeds: Sequence[int], num_for_capacity: int, at_once: int
) -> Curve:
    await site.capacity(num_requests=num_for_capacity // 2, at_once=at_once)  # everything has run once
    capacity = await site.capacity(num_requests=num_for_capacity, at_once=at_once)
    points = [await site.point(multiple, capacity, seconds, seed) for multiple in MULTIPLES for seed in seeds]
    return Curve(case=name, ttft_s=site.ttft_s, capacity=capacity, points=tuple(points))


def main(
    seconds: Annotated[float, typer.Option(help="For which load is offered, at every rate.")] = 15.0,
    seed: Annotated[list[int] | None, typer.Option(help="Of the load; as often as wanted. Default: 101.")] = None,
    ttft_ms: Annotated[float, typer.Option(help="First token within.")] = 1000.0,
    input_len: Annotated[str, typer.Option(help="Prompt tokens.")] = "128:512",
    output_len: Annotated[str, typer.Option(help="Answer tokens.")] = "16:48",
    num_for_capacity: Annotated[int, typer.Option(help="Requests by which capacity is measured.")] = 300,
    at_once: Annotated[int, typer.Option(help="Of them.")] = 48,
    baton: Annotated[str, typer.Option(help="Flags of the `baton up` to be started.")] = "",
    url: Annotated[str, typer.Option(help="A cluster that runs, instead.")] = "",
    num_paced: Annotated[int, typer.Option("--paced", help="So many workers that wait, instead.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Offer one to three times its capacity to a live cluster."""
    with paced(num_paced) if num_paced else _given(url) if url else running(baton) as where:
        target = find_target(where, "", "")
        roles = [str(worker["role"]) for worker in target.workers]
        name = "paced, " * bool(num_paced) + " + ".join(
            f"{roles.count(role)} {role}" for role in dict.fromkeys(sorted(roles, reverse=True))
        )
        prompts = Lengths.parse(input_len, param="--input-len")
        site = Site(target, prompts, Lengths.parse(output_len, param="--output-len"), ttft_ms / 1000)
        curve = asyncio.run(
            measure(
                site,
                f"{target.model.name}, {name}",
                seconds=seconds,
                seeds=seed or (101,),
                num_for_capacity=num_for_capacity,
                at_once=at_once,
            )
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table(curve))
    asked = {
        "seconds": seconds,
        "prompts": input_len,
        "answers": output_len,
        "at_once": at_once,
        "baton": baton,
        "paced": num_paced,
    }
    write_figures(json_file, format=FORMAT, asked=asked, curves=[asdict(curve)])
    if plot_file is not None:
        plot([curve], plot_file)


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    typer.run(main)
