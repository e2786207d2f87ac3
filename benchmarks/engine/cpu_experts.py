"""Measures decode steps of mixtures of experts on a CPU beside the bytes that a token touches, in a thread's CPU time.

    python -m benchmarks.engine.cpu_experts                       bfloat16, int8 and int4
    python -m benchmarks.engine.cpu_experts --json experts.json
    python -m benchmarks.engine.cpu_experts --layers 12 --level int4     as deep as a small model

Models of random weights with the shapes of Mixtral and Qwen3-MoE, small enough to write; no server. A step of one
stream reads every dense weight, the head and one token's experts: the floor is these bytes over the bandwidth that the
thread measured in the same run. Bars: a step of one stream takes at most its floor / 0.7, and 32 streams bring at least
2.5 times the tokens of one. CPU time leaves out what other processes take of the core. A step has half a millisecond
beside its weights, whatever the model: with few layers that is much of it.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.engine.cpu_quantised import bytes_per_s
from benchmarks.engine.random_llama import CONFIG, shapes
from benchmarks.output import JsonFile, write_figures
from protos.values import GenerateRequest, SamplingParams
from workers.build_rank import build_engine, open_rank
from workers.engine.engine import Engine
from workers.models.model_config import read_config, weight_bytes
from workers.parallel.group import Solo
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.weights.weight_formats import Quantize
from workers.worker_config import WorkerConfig

SMALL = CONFIG | {"num_hidden_layers": 4, "vocab_size": 8000}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral-shaped": SMALL
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
       "num_experts_per_tok": 2, "intermediate_size": 3584},
    "Qwen3-MoE-shaped": SMALL
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
       "moe_intermediate_size": 384, "norm_topk_prob": True},
}  # fmt: skip
LEVELS: tuple[Quantize, ...] = ("off", "int8", "int4")
STREAMS = (1, 32)
NUM_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFigure:
    """Seconds are the thread's own, of the best step; `floor_s` is one stream's."""

    model: str
    quantize: Quantize
    touched_bytes: float
    bytes_per_s: float
    step_s: dict[int, float]  # by streams

    @property
    def share_of_floor(self) -> float:
        return self.touched_bytes / self.bytes_per_s / self.step_s[1]

    @property
    def gain(self) -> float:
        """Tokens of 32 streams over those of one, in the same time."""
        return 32 * self.step_s[1] / self.step_s[32]


def write_mixture(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint with an expert's tensors for each: bfloat16, normal with a deviation of 0.02, norms 1."""
    generator = torch.Generator().manual_seed(0)
    hidden, is_mixtral = config["hidden_size"], "num_local_experts" in config
    width = config["intermediate_size" if is_mixtral else "moe_intermediate_size"]
    module = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {name: shape for name, shape in shapes(config).items() if ".mlp." not in name}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.{module}"
        count = config["num_local_experts" if is_mixtral else "num_experts"]
        found[f"{prefix}.gate.weight"] = (count, hidden)
        for expert in range(count):
            for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
                found[f"{prefix}.experts.{expert}.{name}.weight"] = shape
        if not is_mixtral:
            norms = f"model.layers.{layer}.self_attn"
            found |= {f"{norms}.{name}_norm.weight": (config["head_dim"],) for name in ("q", "k")}
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in found.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def touched_bytes(folder: Path, quantize: Quantize) -> float:
    """That a token reads: all weights but the embedding's and those of experts that it does not choose."""
    config = read_config(folder)
    assert config.experts is not None
    embedding = 2 * config.vocab_size * config.hidden_size
    total, plain = weight_bytes(folder, "bfloat16", quantize) - embedding, 2 * config.num_linear_weights
    idle = 1 - config.experts.routing.num_chosen / config.experts.num_experts
    num_experts = config.experts.num_experts * config.experts.num_sparse_layers
    experts = 3 * config.hidden_size * config.experts.width * num_experts
    return total - experts * idle * 2 * total / plain


def best_step_s(engine: Engine, streams: int) -> float:
    chance = random.Random(streams)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    for index in range(streams):
        prompt_ids = tuple(chance.randrange(3, 4000) for _ in range(16))
        request = GenerateRequest(request_id=f"{streams}-{index}", prompt_ids=prompt_ids, sampling=sampling)
        engine.submit(request, now=0.0)
    best = float("inf")
    while engine.has_work():
        start = time.thread_time()
        updates = engine.step(now=0.0)
        took = time.thread_time() - start
        decodes = not any(update.num_prompt_computed for update in updates)
        if decodes and sum(len(update.token_ids) for update in updates) == streams:
            best = min(best, took)
    return best


def measured(name: str, folder: Path, quantize: Quantize) -> ExpertsFigure:
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=256, quantize=quantize, bind_cores="off")
    rank = open_rank(config, Solo())
    leader = Leader(rank.group)
    torch.set_num_threads(1)
    engine = build_engine(rank, leader, lambda _: Role(), incarnation=1, clock=time.monotonic)
    step_s = dict.fromkeys(STREAMS, float("inf"))
    bandwidth = 0.0
    for _ in range(3):  # by turns, so that what else the machine does meets all alike
        bandwidth = max(bandwidth, bytes_per_s())
        for streams in STREAMS:
            step_s[streams] = min(step_s[streams], best_step_s(engine, streams))
    leader.close()
    return ExpertsFigure(
        model=name,
        quantize=quantize,
        touched_bytes=touched_bytes(folder, quantize),
        bytes_per_s=bandwidth,
        step_s=step_s,
    )


@torch.inference_mode()
def main(
    json_file: JsonFile = None,
    layers: Annotated[int, typer.Option(help="of each model")] = 4,
    level: Annotated[list[str] | None, typer.Option(help="off, int8 or int4; all by default")] = None,
) -> None:
    if unknown := set(level or ()) - set(LEVELS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: give {', '.join(LEVELS)}", param_hint="--level")
    torch.set_num_threads(1)
    table = Table(title=f"one thread, {layers} layers; the floor is touched bytes / bandwidth")
    for column in (
        "",
        "weights",
        "touched MB",
        "GB/s",
        "ms, 1 stream",
        "of the floor",
        "ms, 32 streams",
        "x tokens of one",
    ):
        table.add_column(column, justify="right")
    figures = []
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_mixture(Path(folder), config | {"num_hidden_layers": layers})
            for quantize in [one for one in LEVELS if not level or one in level]:
                one = measured(name, Path(folder), quantize)
                figures.append(asdict(one) | {"share_of_floor": one.share_of_floor, "gain": one.gain})
                table.add_row(
                    name, quantize, f"{one.touched_bytes / 1e6:.1f}", f"{one.bytes_per_s / 1e9:.1f}",
                    f"{one.step_s[1] * 1e3:.2f}", f"{one.share_of_floor:.2f}", f"{one.step_s[32] * 1e3:.1f}",
                    f"{one.gain:.2f}",
                )  # fmt: skip
    Console(width=160).print(table)
    write_figures(json_file, layers=layers, figures=figures)


if __name__ == "__main__":
    typer.run(main)
