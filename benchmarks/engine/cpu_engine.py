"""Measures the engine on this machine's CPUs, beside the floor measured in the same run.

    python -m benchmarks.engine.cpu_engine --json figures.json --plot figures.svg
    python -m benchmarks.engine.cpu_engine --vllm-python ENV/bin/python     the same on vLLM too (peers/vllm_cpu.py)
    python -m benchmarks.engine.cpu_engine --llama-python ENV/bin/python    and on llama.cpp (peers/llama_cpp.py)

Random weights of 368 million parameters, the shape that docs/performance.md compares; then the demo model.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.floors import MachineRates, ModelCosts, Needs, TokenLoad, best_of, measure, needs
from benchmarks.engine.peer_process import EngineRun, peer_process
from benchmarks.engine.random_llama import write_checkpoint
from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from protos.values import GenerateRequest, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.engine.engine import Engine
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
NUM_BLOCKS = 2048

LARGE = (
    TokenLoad(name="32 x (512 -> 128)", num_requests=32, input_len=512, output_len=128),
    TokenLoad(name="8 x (2048 -> 32)", num_requests=8, input_len=2048, output_len=32),
    TokenLoad(name="1 x (256 -> 64)", num_requests=1, input_len=256, output_len=64),
    TokenLoad(name="4 x (256 -> 64)", num_requests=4, input_len=256, output_len=64),
    TokenLoad(name="16 x (256 -> 64)", num_requests=16, input_len=256, output_len=64),
)
SMALL = (
    TokenLoad(name="1 x (256 -> 128)", num_requests=1, input_len=256, output_len=128),
    TokenLoad(name="32 x (512 -> 128)", num_requests=32, input_len=512, output_len=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """One workload on one engine. `ttft_s` is the median over its requests, all given at once; `cpu_s` what all the
    engine's processes took of the cores: with one thread, the seconds on a machine that does nothing else.

    `prefill_s` ends with the last first token: what was decoded meanwhile counts as prefill.
    """

    engine: str
    model: str
    workload: TokenLoad
    seconds: float
    cpu_s: float
    ttft_s: float
    prefill_s: float
    floor_s: float
    num_threads: int

    @property
    def output_tokens_per_s(self) -> float:
        return self.workload.num_requests * self.workload.output_len / self.seconds

    @property
    def tokens_per_s(self) -> float:
        both = self.workload.input_len + self.workload.output_len
        return self.workload.num_requests * both / self.seconds

    @property
    def share(self) -> float:
        """Of the floor, in the time in which the floor was measured: a single thread's own, else the clock's."""
        return self.floor_s / (self.cpu_s if self.num_threads == 1 else self.seconds)


@contextmanager
def opened(folder: Path, num_blocks: int = NUM_BLOCKS) -> Iterator[Engine]:
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=num_blocks)
    rank = open_rank(config, Solo())
    rank.storage.data.zero_()  # as after a while: a system that lends a page for the first time takes its time
    leader = Leader(rank.group)
    try:
        yield build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=time.monotonic)
    finally:
        leader.close()


def run(engine: Engine, workload: TokenLoad, chance: random.Random) -> EngineRun:
    """Prompts share no prefix, and all are there at the start."""
    sampling = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
    start, cpu_start = time.perf_counter(), time.process_time()
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
    cpu_s = time.process_time() - cpu_start
    return EngineRun(seconds=time.perf_counter() - start, cpu_s=cpu_s, ttft_s=list(first.values()))


def on_baton(folder: Path, workloads: Sequence[TokenLoad], repeat: int) -> list[list[EngineRun]]:
    chance = random.Random(1)
    with opened(folder) as engine:
        run(engine, TokenLoad(name="warm-up", num_requests=2, input_len=64, output_len=4), chance)
        return [[run(engine, workload, chance) for workload in workloads] for _ in range(repeat)]


def on_peer(
    python: Path,
    script: str,
    folder: Path,
    workloads: Sequence[TokenLoad],
    repeat: int,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, list[list[EngineRun]]]:
    """Its version, and its runs, with as many threads as this process has."""
    threads = torch.get_num_threads()
    with peer_process(python, script, folder, workloads, threads, *more, environment=environment) as peer:
        return peer.version, [peer.round() for _ in range(repeat)]


def figures_of(
    engine: str,
    model: str,
    costs: ModelCosts,
    workloads: Sequence[TokenLoad],
    rounds: list[list[EngineRun]],
    machine: MachineRates,
) -> list[EngineFigures]:
    """The best round of each workload counts: other load on the machine only makes a round slower."""
    found = []
    for workload, runs in zip(workloads, zip(*rounds, strict=True), strict=True):
        best = min(runs, key=lambda run: run.seconds)
        found.append(
            EngineFigures(
                engine=engine,
                model=model,
                workload=workload,
                seconds=best.seconds,
                cpu_s=min(run.cpu_s for run in runs),
                ttft_s=statistics.median(best.ttft_s) if best.ttft_s else float("nan"),
                prefill_s=max(best.ttft_s, default=float("nan")),
                num_threads=machine.num_threads,
                floor_s=sum(phase.floor_s(machine) for phase in needs(workload, costs)),
            )
        )
    return found


def scaled(workloads: Sequence[TokenLoad], divisor: int) -> list[TokenLoad]:
    """With fewer requests, the lengths as they are; what then is the same stands once."""
    counts = [(workload, max(1, workload.num_requests // divisor)) for workload in workloads]
    return list(
        dict.fromkeys(
            TokenLoad(
                name=f"{count} x ({workload.input_len} -> {workload.output_len})",
                num_requests=count,
                input_len=workload.input_len,
                output_len=workload.output_len,
            )
            for workload, count in counts
        )
    )


def show(figures: list[EngineFigures], machine: MachineRates) -> None:
    table = Table(
        title=f"{machine.num_threads} threads, {machine.bytes_per_s / 1e9:.1f} GB/s read from memory, "
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s of bfloat16 products"
    )
    words = ("model", "workload", "engine")
    for head in (*words, "output tok/s", "all tok/s", "first token", "s", "core s", "floor s", "share"):
        table.add_column(head, justify="left" if head in words else "right")
    for one in sorted(figures, key=lambda one: (one.model, figures.index(one) if one.engine == "baton" else 0)):
        table.add_row(
            one.model,
            one.workload.name,
            one.engine,
            f"{one.output_tokens_per_s:,.1f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.ttft_s * 1000:,.0f} ms",
            f"{one.seconds:.2f}",
            f"{one.cpu_s:.2f}",
            f"{one.floor_s:.2f}",
            f"{one.share:.0%}",
        )
    Console(width=140).print(table)


def draw(figures: list[EngineFigures], costs: dict[str, ModelCosts], machine: MachineRates, path: Path) -> None:
    """A roofline for each model: prompts to the right, answers to the left, the machine's roof above both."""
    with drawing(path, size=(6 * len(costs), 4.5), columns=len(costs), sharey=True) as axes:
        for axis, model in zip(axes[0], costs, strict=True):
            mine = [one for one in figures if one.model == model]
            points = [point for one in mine for point in phases(one, costs[model])]
            reach = [need.flops / need.num_bytes for _, _, need, _ in points]
            edges = [0.5 * min(reach), machine.flops_per_s / machine.bytes_per_s, 2 * max(reach)]
            roof = [min(machine.flops_per_s, edge * machine.bytes_per_s) / 1e9 for edge in sorted(edges)]
            axis.loglog(sorted(edges), roof, color="grey", label="roof, measured")
            for engine, marker in zip(dict.fromkeys(one.engine for one in mine), "osD", strict=False):
                of_engine = [point for point in points if point[0] == engine]
                intensities = [need.flops / need.num_bytes for _, _, need, _ in of_engine]
                axis.scatter(
                    intensities, [need.flops / s / 1e9 for *_, need, s in of_engine], marker=marker, label=engine
                )
            for engine, name, need, seconds in points:
                if engine == "baton":
                    axis.annotate(name, (need.flops / need.num_bytes, need.flops / seconds / 1e9), fontsize=6)
            axis.set_title(model, fontsize=10)
            axis.set_xlabel("operations for each byte read from memory")
            axis.set_ylabel("GFLOP/s")
            axis.legend(fontsize=8)


def phases(one: EngineFigures, costs: ModelCosts) -> list[tuple[str, str, Needs, float]]:
    """Engine, what it did, what that needs, and the seconds it took."""
    prefill, decode = needs(one.workload, costs)
    return [
        (one.engine, f"prompts of {one.workload.name}", prefill, one.prefill_s),
        (one.engine, f"answers of {one.workload.name}", decode, one.seconds - one.prefill_s),
    ]


def record(one: EngineFigures) -> dict[str, Any]:
    return asdict(one) | {name: getattr(one, name) for name in ("output_tokens_per_s", "tokens_per_s", "share")}


def main(
    threads: Annotated[int, typer.Option(help="Of torch and the kernels; 0: a thread a core.")] = 0,
    divisor: Annotated[int, typer.Option(min=1, help="Give this many times fewer requests.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds, of which the best counts.")] = 1,
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment that has vllm-cpu.")] = None,
    vllm_preload: Annotated[str, typer.Option(help="Its LD_PRELOAD: tcmalloc and libiomp5.")] = "",
    llama_python: Annotated[Path | None, typer.Option(help="Python of one that has llama-cpp-python, gguf.")] = None,
    llama_type: Annotated[str, typer.Option(help="Of llama.cpp's weights: q8_0 or bf16.")] = "q8_0",
    llama_divisor: Annotated[
        int, typer.Option(min=1, help="Give it, a slow one, so many times fewer of the first two loads.")
    ] = 1,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    num_threads = threads or len(os.sched_getaffinity(0))
    machines = [measure(num_threads)]
    large, small = scaled(LARGE, divisor), scaled(SMALL, divisor)
    rounds: list[tuple[str, str, ModelCosts, list[TokenLoad], list[list[EngineRun]]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama-368m"
        write_checkpoint(folder)
        costs = ModelCosts.of_files(folder)
        rounds.append(("baton", "368M, random", costs, large, on_baton(folder, large, repeat)))
        machines.append(measure(num_threads))
        if vllm_python is not None:
            preload = {"LD_PRELOAD": vllm_preload} if vllm_preload else {}
            version, runs = on_peer(vllm_python, "vllm_cpu.py", folder, large, repeat, environment=preload)
            rounds.append((f"vllm-cpu {version}", "368M, random", costs, large, runs))
        if llama_python is not None:
            fewer = scaled(large[:2], llama_divisor) + large[2:]
            version, runs = on_peer(llama_python, "llama_cpp.py", folder, fewer, 1, llama_type)
            rounds.append((f"llama.cpp {version}", "368M, random", costs, fewer, runs))
    rounds.append(("baton", "demo, 5M", ModelCosts.of_files(DEMO), small, on_baton(DEMO, small, repeat)))
    machine = best_of([*machines, measure(num_threads)])
    figures: list[EngineFigures] = []
    for engine, model, costs, workloads, runs in rounds:
        figures += figures_of(engine, model, costs, workloads, runs, machine)
    show(figures, machine)
    write_figures(json_file, machine=asdict(machine), figures=[record(one) for one in figures])
    if plot is not None:
        draw(figures, {model: costs for _, model, costs, _, _ in rounds}, machine, plot)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
