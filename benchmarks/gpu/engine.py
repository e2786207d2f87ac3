"""Measures the engine on a GPU: decode steps and prompts beside their floors, and transformers.

    python -m benchmarks.gpu.engine --json engine.json --plot engine.svg      a Llama 3 8B in shape, random weights
    python -m benchmarks.gpu.engine --tiny --device cpu                       the same program on a toy: does it run?

Floors are those of the roofline: the bytes that a step must read over the bandwidth of a copy (read and written bytes
counted), or its operations over the rate of bfloat16 products, whichever is longer; both are measured in the same run.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.floors import ModelCosts, Needs, TokenLoad, needs
from benchmarks.engine.random_llama import CONFIG
from benchmarks.gpu.machine import GpuRates, measure_machine, name_of, require_gpu
from protos.values import GenerateRequest, SamplingParams
from workers.attention.registry import attention_for
from workers.build_rank import LoadedRank, build_engine
from workers.engine.engine import Engine
from workers.kernels.device_kernels import kernels_for
from workers.kv.kv_storage import DTYPES, KVStorage
from workers.models.decoder import Decoder
from workers.models.model_config import ModelConfig, read_config
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.runner.cuda_graphs import CudaRecorder
from workers.runner.torch_runner import TorchRunner
from workers.scheduling.role import Role
from workers.weights.encoding import LayerContext
from workers.weights.formats.float_matrix import only_floats
from workers.worker_config import SchedulerConfig, WorkerConfig

LLAMA_8B = CONFIG | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
    "rope_theta": 500_000.0,
}
TOY = CONFIG | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What is measured: decode steps of `batches` answers at `context` tokens, prompts of `prompt_len`, and `served`
    by both engines. `max_rows` answers run at once."""

    batches: tuple[int, ...]
    context: int
    num_steps: int
    prompt_len: int
    served: TokenLoad
    max_rows: int

    @property
    def num_blocks(self) -> int:
        longest = max(self.context + 2 * self.num_steps, self.served.input_len + self.served.output_len)
        return (self.max_rows * (longest + 32) + 2 * self.prompt_len) // 16


LARGE = EnginePlan(
    batches=(1, 4, 16, 64),
    context=1024,
    num_steps=64,
    prompt_len=8192,
    served=TokenLoad(name="64 x (512 -> 128)", num_requests=64, input_len=512, output_len=128),
    max_rows=64,
)
SMALL = EnginePlan(
    batches=(1, 3),
    context=20,
    num_steps=4,
    prompt_len=64,
    served=TokenLoad(name="3 x (16 -> 8)", num_requests=3, input_len=16, output_len=8),
    max_rows=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigure:
    """A median, and what this project aims at: `aim` is a share of the floor."""

    what: str
    seconds: float
    floor_s: float
    aim: float

    @property
    def share(self) -> float:
        return self.floor_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """`workload` by one engine, all requests given at once; `seconds` until all are answered."""

    engine: str
    workload: TokenLoad
    seconds: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.workload.num_requests * self.workload.output_len / self.seconds


@contextmanager
def opened(folder: Path, plan: EnginePlan, device: str) -> Iterator[Engine]:
    """An engine as a worker has it, but for its weights, which are made where they are needed."""
    config = WorkerConfig(
        model=str(folder),
        device="cuda" if device == "cuda" else "cpu",
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.max_rows,
        max_num_batched_tokens=plan.prompt_len,
        prefill_chunk=plan.prompt_len,
    )
    model = read_config(folder)
    rank = random_rank(config, model, device)
    leader = Leader(rank.group)
    try:
        yield build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=time.perf_counter)
    finally:
        leader.close()


def random_rank(config: WorkerConfig, model: ModelConfig, device: str) -> LoadedRank:
    assert config.num_blocks is not None
    layout = model.kv_layout(block_size=config.block_size, dtype="bfloat16", tp=1)
    decoder = Decoder(
        model,
        LayerContext(
            device=device,
            dtype=DTYPES["bfloat16"],
            parallel=Solo(),
            kernels=kernels_for(device),
            encodings=only_floats,
        ),
    )
    for slot in decoder.slots():
        if len(slot.shape) == 1:
            slot.target.fill_(1.0)
        else:
            slot.target.normal_(std=0.02)
    decoder.pack()
    storage = KVStorage(layout, num_blocks=config.num_blocks, device=device)
    runner = TorchRunner(decoder, attention_for(storage), block_size=config.block_size)
    max_model_len = min(model.max_model_len, config.num_blocks * config.block_size)
    if device == "cuda":
        runner.capture(CudaRecorder(), max_rows=config.max_num_seqs, max_blocks=-(-max_model_len // config.block_size))
    return LoadedRank(
        model=model,
        name="random",
        layout=layout,
        device=device,
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk,
        ),
        group=Solo(),
        storage=storage,
        runner=runner,
        steps_in_flight=1 if device == "cuda" else 0,
    )


def submit(engine: Engine, chance: random.Random, num_requests: int, input_len: int, output_len: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index in range(num_requests):
        prompt_ids = tuple(chance.randrange(3, 500) for _ in range(input_len))
        engine.submit(GenerateRequest(request_id=str(index), prompt_ids=prompt_ids, sampling=sampling), now=0.0)


def finish(engine: Engine) -> float:
    start_s = time.perf_counter()
    while engine.has_work():
        engine.step(0.0)
    return time.perf_counter() - start_s


def decode_step_s(engine: Engine, chance: random.Random, batch: int, plan: EnginePlan) -> float:
    """From the report of one step to that of the next one, host and device together: the median of `num_steps`."""
    submit(engine, chance, batch, plan.context, 2 * plan.num_steps)
    ends: list[float] = []
    while engine.has_work():
        updates = engine.step(0.0)
        if len(updates) == batch and not any(update.finish_reason for update in updates):
            ends.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ends)]
    return statistics.median(gaps[-plan.num_steps :])


def on_baton(folder: Path, plan: EnginePlan, machine: GpuRates, device: str) -> tuple[list[GpuFigure], ServedLoad]:
    chance = random.Random(1)
    costs = ModelCosts.of(read_config(folder))
    with opened(folder, plan, device) as engine:
        submit(engine, chance, plan.batches[-1], 32, 8)
        finish(engine)
        figures = [
            GpuFigure(
                what=f"decode step, {batch} x {plan.context}",
                seconds=decode_step_s(engine, chance, batch, plan),
                floor_s=machine.floor_s(decode_needs(costs, batch, plan)),
                aim=0.85,
            )
            for batch in plan.batches
        ]
        prompt = TokenLoad(name="", num_requests=1, input_len=plan.prompt_len, output_len=1)
        seconds = []
        for _ in range(4):
            submit(engine, chance, 1, plan.prompt_len, 1)
            seconds.append(finish(engine))
        floor_s = machine.floor_s(needs(prompt, costs, tokens_of_step=plan.prompt_len)[0])
        figures.append(
            GpuFigure(
                what=f"prompt of {plan.prompt_len}", seconds=statistics.median(seconds[1:]), floor_s=floor_s, aim=0.6
            )
        )
        submit(engine, chance, plan.served.num_requests, plan.served.input_len, plan.served.output_len)
        served = ServedLoad(engine="baton", workload=plan.served, seconds=finish(engine))
    return figures, served


def decode_needs(costs: ModelCosts, batch: int, plan: EnginePlan) -> Needs:
    """Of one step in the middle of those that are measured."""
    context = plan.context + plan.num_steps + plan.num_steps // 2
    params = costs.layer_params + costs.head_params
    return Needs(
        flops=batch * (2 * params + costs.flops_per_pair * context),
        num_bytes=2 * params + batch * costs.kv_bytes * context,
    )


def on_transformers(folder: Path, plan: EnginePlan, device: str) -> ServedLoad:
    """Its continuous batching with its own defaults, started and warmed up before it is timed. On a CPU those would
    take most of its memory: there the cache is as small as the toy."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    work = plan.served
    generation = GenerationConfig(
        max_new_tokens=work.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1
    )
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64) if device != "cuda" else None
    chance = random.Random(2)
    seconds = 0.0
    for _ in range(2):
        prompts = [[chance.randrange(3, 500) for _ in range(work.input_len)] for _ in range(work.num_requests)]
        start_s = time.perf_counter()
        results = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=small, persistent_manager=True
        )
        seconds = time.perf_counter() - start_s
        lengths = [len(result.generated_tokens) for result in results.values()]
        assert lengths == [work.output_len] * work.num_requests, f"transformers answered with {lengths} tokens"
    model.destroy_cached_continuous_batching_manager()
    return ServedLoad(engine="transformers", workload=work, seconds=seconds)


def show(figures: Sequence[GpuFigure], served: Sequence[ServedLoad], machine: GpuRates, device: str) -> None:
    table = Table(title=f"{name_of(device)}: {machine}")
    for head in ("what", "time", "floor", "share of it", "aim"):
        table.add_column(head, justify="left" if head == "what" else "right")
    for one in figures:
        times = f"{one.seconds * 1e3:,.3f} ms", f"{one.floor_s * 1e3:,.3f} ms"
        table.add_row(one.what, *times, f"{one.share:.0%}", f"{one.aim:.0%}")
    Console(width=120).print(table)
    for run in served:
        print(f"{run.engine:14}{run.workload.name:24}{run.output_tokens_per_s:12,.1f} output tokens/s")
    if len(served) == 2:
        print(f"baton / transformers: {served[1].seconds / served[0].seconds:.1f} (aim: 5)")


def draw(figures: Sequence[GpuFigure], path: Path, device: str) -> None:
    with drawing(path, size=(7, 3.5)) as [[axis]]:
        places = range(len(figures))
        axis.barh(places, [one.share for one in figures], color="tab:blue")
        axis.plot([one.aim for one in figures], places, "k|", markersize=18, label="aim")
        axis.set_yticks(places, [one.what for one in figures])
        axis.set_xlabel("share of the measured floor")
        axis.set_title(name_of(device), fontsize=10)
        axis.legend()


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="A toy model: does the program run?")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run with --tiny.")] = "cuda",
    layers: Annotated[int, typer.Option(min=1, help="Fewer layers of the 8B shape.")] = 32,
    peer: Annotated[bool, typer.Option(help="Measure transformers' continuous batching too.")] = True,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    require_gpu(device, tiny)
    plan, config = (SMALL, TOY) if tiny else (LARGE, LLAMA_8B | {"num_hidden_layers": layers})
    machine = measure_machine(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config))
        figures, ours = on_baton(folder, plan, machine, device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        served = [ours, on_transformers(folder, plan, device)] if peer else [ours]
    show(figures, served, machine, device)
    write_figures(
        json_file,
        machine=asdict(machine),
        figures=[asdict(one) | {"share": one.share} for one in figures],
        served=[asdict(one) | {"output_tokens_per_s": one.output_tokens_per_s} for one in served],
    )
    if plot is not None:
        draw(figures, plot, device)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
