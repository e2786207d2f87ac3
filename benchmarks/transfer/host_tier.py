"""Measures the time to the first token of a prompt that is computed, in host memory, or on the device.

    python -m benchmarks.transfer.host_tier
    python -m benchmarks.transfer.host_tier --core-time      seconds of one core, where others use the machine as well

One engine in this process, on a CPU, where the host's memory is the device's: it shows the cost of
copies and bookkeeping, not the link of a GPU. Rounds take turns, each with a prompt of its own; the medians count.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import DEMO
from benchmarks.engine.random_llama import write_checkpoint
from benchmarks.output import JsonFile, PlotFile, write_bars
from kvtransfer.hashing import chain_hashes
from protos.values import GenerateRequest, HostLoad, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.engine.engine import Engine
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

BLOCK = 16
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@contextmanager
def opened(folder: Path, num_tokens: int) -> Iterator[Engine]:
    """With room for one prompt and a bit on the device, and for many on the host."""
    num_blocks = num_tokens // BLOCK + 1
    config = WorkerConfig(
        model=str(folder), num_blocks=num_blocks, max_model_len=num_tokens + BLOCK, block_size=BLOCK, host_kv_gib=1.0
    )
    rank = open_rank(config, Solo())
    rank.storage.data.zero_()
    leader = Leader(rank.group)
    try:
        yield build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=time.monotonic)
    finally:
        leader.close()


def first_token_s(engine: Engine, prompt_ids: tuple[int, ...], clock: Callable[[], float]) -> tuple[float, int]:
    """And how many tokens were found."""
    start = clock()
    engine.submit(GenerateRequest(request_id="r", prompt_ids=prompt_ids, sampling=ONE), now=start)
    num_cached = 0
    while engine.has_work():
        for update in engine.step(now=clock()):
            num_cached = max(num_cached, update.num_cached_tokens)
    return clock() - start, num_cached


def measure(
    folder: Path, num_tokens: int, num_rounds: int, clock: Callable[[], float]
) -> tuple[list[str], dict[str, float]]:
    """A table's cells, and the milliseconds of each kind."""
    chance = random.Random(1)

    def fresh() -> tuple[int, ...]:
        return tuple(chance.randrange(3, 4000) for _ in range(num_tokens))

    times: dict[str, list[float]] = defaultdict(list)
    with opened(folder, num_tokens) as engine:
        first_token_s(engine, fresh(), clock)
        load, loaded_before_s = HostLoad(), 0.0
        for _ in range(num_rounds):
            prompt = fresh()
            computed_s, _ = first_token_s(engine, prompt, clock)
            device_s, on_device = first_token_s(engine, prompt, clock)
            for _ in range(2):
                first_token_s(engine, fresh(), clock)
            assert not engine.pool.match(chain_hashes(prompt, BLOCK))
            host_s, on_host = first_token_s(engine, prompt, clock)
            load = engine.load().host or HostLoad()
            assert on_device == on_host, f"{on_host} tokens were found, {on_device} on the device: was it not loaded?"
            for name, value in (("computed", computed_s), ("device", device_s), ("host", host_s)):
                times[name].append(value * 1000)
            times["copied"].append((load.load_s - loaded_before_s) * 1000)
            loaded_before_s = load.load_s
    middle = {name: statistics.median(values) for name, values in times.items()}
    speed = load.loaded_bytes / load.load_s / 1e9
    cells = [
        *(f"{middle[name]:,.1f}" for name in ("computed", "host", "copied", "device")),
        f"{load.loaded_bytes / load.num_loaded * (num_tokens // BLOCK) / 2**20:.0f}",
        f"{speed:.1f}",
        f"{middle['computed'] / middle['host']:.1f}",
    ]
    return cells, {"computed": middle["computed"], "host hit": middle["host"], "device hit": middle["device"]}


def main(
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 2032,
    rounds: Annotated[int, typer.Option(help="Of each kind.")] = 7,
    core_time: Annotated[bool, typer.Option("--core-time", help="One thread, and its processor time.")] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    if core_time:
        torch.set_num_threads(1)
    clock = time.process_time if core_time else time.perf_counter
    table = Table(title=f"milliseconds{' of one core' * core_time} to the first token of a prompt of {tokens} tokens")
    figures: dict[str, dict[str, float]] = {}
    columns = ("model", "computed", "host hit", "of it copying", "device hit", "MiB", "GB/s", "computed / host")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch))
        for model, folder in (("demo", DEMO), ("368M, random", Path(scratch))):
            cells, figures[model] = measure(folder, tokens, rounds, clock)
            table.add_row(model, *cells)
    Console(width=140).print(table)
    write_bars(figures, unit=f"ms{' of one core' * core_time}, {tokens} tokens", json_file=json_file, plot=plot)


if __name__ == "__main__":
    typer.run(main)
