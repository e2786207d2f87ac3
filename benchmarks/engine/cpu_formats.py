"""Compares quantised weights in Baton's engine with bfloat16, and with vLLM and llama.cpp on the same files, by turns.

    python -m benchmarks.engine.cpu_formats prepare FOLDER --llama-python PY    once
    python -m benchmarks.engine.cpu_formats measure FOLDER --vllm-python PY --llama-python PY --json figures.json
    python -m benchmarks.engine.cpu_formats measure FOLDER --only bfloat16 --neighbour    beside a busy process

In each round every engine of a group computes every workload once; the median of the rounds counts. Groups follow one
another, so that one peer at a time is in memory. Baton in bfloat16 is in every group: machines change within minutes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cpu_engine import opened, run
from benchmarks.engine.floors import MachineRates, ModelCosts, TokenLoad, best_of, measure, needs
from benchmarks.engine.peer_process import PEERS, EngineRun, peer_process
from benchmarks.engine.random_llama import CONFIG, write_checkpoint
from benchmarks.engine.random_quantised import LARGE_CONFIG, write_quantised
from benchmarks.output import JsonFile, write_figures

FLOATS = "bf16"
PREFILL = TokenLoad(name="prefill 512", num_requests=1, input_len=512, output_len=1)
LOADS = (
    TokenLoad(name="1", num_requests=1, input_len=32, output_len=32),
    TokenLoad(name="4", num_requests=4, input_len=32, output_len=24),
    TokenLoad(name="16", num_requests=16, input_len=32, output_len=16),
    TokenLoad(name="32", num_requests=32, input_len=32, output_len=16),
    PREFILL,
)
TINY = tuple(TokenLoad(name=one.name, num_requests=one.num_requests, input_len=8, output_len=2) for one in LOADS[:2])
TINY_CONFIG = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip
NUM_BLOCKS = 128  # of 16 tokens: 32 x (32 + 16), and what is not freed yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Engines that take turns: Baton in bfloat16, Baton on `model`, and a peer on the same files."""

    name: str
    model: str  # in the folder of models
    peer: str = ""  # a script of benchmarks/peers
    beside_floats: bool = True


GROUPS = (
    Group(name="bfloat16", model=FLOATS, peer="vllm_cpu.py", beside_floats=False),
    Group(name="int8 (W8A8)", model="w8a8", peer="vllm_cpu.py"),
    Group(name="int4 (GPTQ)", model="gptq", peer="vllm_cpu.py"),
    Group(name="int4 (AWQ)", model="awq", peer="vllm_cpu.py"),
    Group(name="Q8_0", model="q8_0.gguf", peer="llama_cpp.py"),
    Group(name="Q4_K_M", model="q4_k_m.gguf", peer="llama_cpp.py"),
    Group(name="int4 (GPTQ), 1.5B", model="large-gptq", beside_floats=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFigure:
    """Tokens a second, in the median round: of answers after their first tokens, of the prompt where there is one."""

    group: str
    engine: str
    load: str
    tokens_per_s: float
    floor_tokens_per_s: float


Turn = Callable[[], list[EngineRun]]

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def prepare(
    folder: Path,
    llama_python: Annotated[Path | None, typer.Option(help="Python that has llama-cpp-python and gguf.")] = None,
    tiny: bool = False,
) -> None:
    """Write the models, about 3 GB."""
    config = TINY_CONFIG if tiny else CONFIG
    write_checkpoint(folder / FLOATS, config)
    for method in ("w8a8", "gptq", "awq"):
        write_quantised(folder / method, method, config)
    write_quantised(folder / "large-gptq", "gptq", TINY_CONFIG if tiny else LARGE_CONFIG)
    if llama_python is None:
        return
    floats = folder / "bf16.gguf"
    for arguments in (
        ("convert", folder / FLOATS, floats, "bf16"),
        ("convert", folder / FLOATS, folder / "q8_0.gguf", "q8_0"),
        ("quantise", floats, folder / "q4_k_m.gguf", "Q4_K_M"),
    ):
        subprocess.run([str(part) for part in (llama_python, PEERS / "llama_cpp.py", *arguments)], check=True)
    floats.unlink()


@app.command(name="measure")
def measure_all(
    folder: Path,
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment that has vllm-cpu.")] = None,
    vllm_preload: Annotated[str, typer.Option(help="Its LD_PRELOAD: tcmalloc and libiomp5.")] = "",
    llama_python: Annotated[Path | None, typer.Option(help="Python that has llama-cpp-python and gguf.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Groups whose name has this.")] = None,
    loads_named: Annotated[list[str] | None, typer.Option("--load", help="Loads of this name.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    neighbour: Annotated[bool, typer.Option(help="Keep the last core busy with another process meanwhile.")] = False,
    tiny: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the groups whose models are there, with a thread a core."""
    num_threads = len(os.sched_getaffinity(0))
    machines = [measure(num_threads)]
    pythons = {"vllm_cpu.py": vllm_python, "llama_cpp.py": llama_python}
    found: list[tuple[Group, str, Sequence[TokenLoad], list[list[EngineRun]]]] = []
    for group in GROUPS:
        there = (folder / group.model).exists() and (not only or any(word in group.name for word in only))
        if not there:
            continue
        loads = TINY if tiny else LOADS if group.beside_floats or group.peer else (LOADS[0], LOADS[1], PREFILL)
        loads = tuple(load for load in loads if not loads_named or load.name in loads_named)
        with ExitStack() as engines:
            turns: dict[str, tuple[Sequence[TokenLoad], Turn]] = {}
            if group.beside_floats:
                turns["Baton bf16"] = loads, engines.enter_context(_baton(folder / FLOATS, loads))
            turns["Baton"] = loads, engines.enter_context(_baton(folder / group.model, loads))
            python = pythons.get(group.peer)
            if python is not None:
                preload = {"LD_PRELOAD": vllm_preload} if group.peer == "vllm_cpu.py" and vllm_preload else {}
                for count in (num_threads,) if group.peer == "vllm_cpu.py" else (num_threads, 1):
                    some = loads if count == num_threads else loads[:2]
                    peer = engines.enter_context(
                        peer_process(python, group.peer, folder / group.model, some, count, "", environment=preload)
                    )
                    name = f"{group.peer.removesuffix('.py')} {peer.version.strip()}"
                    turns[f"{name}, {count} threads"] = some, peer.round
            rounds: dict[str, list[list[EngineRun]]] = {name: [] for name in turns}
            with busy_core() if neighbour else nullcontext():
                for _ in range(repeat):
                    for name, (_, turn) in turns.items():
                        rounds[name].append(turn())
            found += [(group, name, turns[name][0], runs) for name, runs in rounds.items()]
        machines.append(measure(num_threads))
        figures = [one for part in found for one in figures_of(*part, folder, machines)]
        show(figures, machines)
        write_figures(json_file, machine=asdict(best_of(machines)), figures=[asdict(one) for one in figures])


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process computes on the last of this process's cores."""
    program = f"import os\nos.sched_setaffinity(0, [{max(os.sched_getaffinity(0))}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def _baton(model: Path, loads: Sequence[TokenLoad]) -> Iterator[Turn]:
    chance = Random(1)
    with opened(model, NUM_BLOCKS) as engine:
        run(engine, TokenLoad(name="warm-up", num_requests=2, input_len=64, output_len=4), chance)
        yield lambda: [run(engine, load, chance) for load in loads]


def figures_of(
    group: Group,
    engine: str,
    loads: Sequence[TokenLoad],
    rounds: Sequence[Sequence[EngineRun]],
    folder: Path,
    machines: Sequence[MachineRates],
) -> list[FormatFigure]:
    costs = ModelCosts.of_files(folder / (FLOATS if engine == "Baton bf16" else group.model))
    found = []
    for load, runs in zip(loads, zip(*rounds, strict=True), strict=True):
        prefill, decode = (phase.floor_s(best_of(machines)) for phase in needs(load, costs))
        if load.output_len == 1:
            num_tokens, floor_s = load.num_requests * load.input_len, prefill
            seconds = statistics.median(run.seconds for run in runs)
        else:
            num_tokens, floor_s = load.num_requests * (load.output_len - 1), decode
            seconds = statistics.median(run.seconds - max(run.ttft_s) for run in runs)
        found.append(
            FormatFigure(
                group=group.name,
                engine=engine,
                load=load.name,
                tokens_per_s=num_tokens / seconds,
                floor_tokens_per_s=num_tokens / floor_s,
            )
        )
    return found


def show(figures: Sequence[FormatFigure], machines: Sequence[MachineRates]) -> None:
    """Beside each rate its share of the floor, and how many times the rate of Baton's it is."""
    machine = best_of(machines)
    loads = list(dict.fromkeys(one.load for one in figures))
    table = Table(
        title=f"tokens/s (of the floor; Baton's rate / this one's); {machine.num_threads} threads, "
        f"{machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s of bfloat16"
    )
    for head in ("weights", "engine", *(load if load.startswith("prefill") else f"decode {load}" for load in loads)):
        table.add_column(head)
    rates = {(one.group, one.engine, one.load): one for one in figures}
    for group, engine in dict.fromkeys((one.group, one.engine) for one in figures):
        cells = []
        for load in loads:
            one, own = rates.get((group, engine, load)), rates.get((group, "Baton", load))
            text = "" if one is None else f"{one.tokens_per_s:.1f} ({one.tokens_per_s / one.floor_tokens_per_s:.0%}"
            if one is not None and own is not None and engine != "Baton":
                text += f"; {own.tokens_per_s / one.tokens_per_s:.2f}"
            cells.append(f"{text})" if text else "")
        table.add_row(group, engine, *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    app()
