"""What LoRA adapters cost a step on a CPU, beside the same rows without: a random Llama of 368M parameters, bfloat16.

    python -m benchmarks.engine.cpu_adapters --json figures.json

Steps are timed by turns, in CPU time of one thread; the figures are medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.engine.random_llama import write_checkpoint
from benchmarks.output import JsonFile, write_figures
from protos.values import SamplingParams
from workers.adapters.linear import AdapterTable
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kv.kv_storage import KVStorage
from workers.models.decoder import Decoder
from workers.models.loader import load_model
from workers.runner.torch_runner import TorchRunner

BLOCK_SIZE, TURNS = 16, 9
_SAMPLE = Sample(params=SamplingParams(temperature=0.0), index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFigure:
    rows: str
    adapters: str
    step_ms: float
    times_base: float


def write_adapter(decoder: Decoder, folder: Path, *, rank: int, seed: int) -> Path:
    """Of all linear layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for linear in decoder.linears():
        for part in linear.share.projections:
            name = f"base_model.model.{part.name}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, linear.share.total_inputs, generator=generator) * 0.01
            tensors[f"{name}.lora_B.weight"] = torch.randn(part.total, rank, generator=generator) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def batch(adapters: Sequence[str], num_tokens: int) -> Batch:
    """A row for each adapter, "" for none, of so many tokens behind 128."""
    num_blocks = -(-(128 + num_tokens) // BLOCK_SIZE)
    rows = [
        Row(
            request_id=str(number),
            token_ids=tuple(range(10, 10 + num_tokens)),
            start=128,
            block_tables=(tuple(range(number * num_blocks, (number + 1) * num_blocks)),),
            sample=_SAMPLE,
            prompt_len=128 + num_tokens,
            adapter=adapter,
        )
        for number, adapter in enumerate(adapters)
    ]
    return Batch(rows=tuple(rows))


def measure(decoder: Decoder, ids: Sequence[str]) -> list[AdapterFigure]:
    storage = KVStorage(decoder.config.kv_layout(block_size=BLOCK_SIZE, dtype="bfloat16"), num_blocks=512)
    runner = TorchRunner(decoder, attention_for(storage), block_size=BLOCK_SIZE)
    one, two = ids
    figures = []
    for rows, number, num_tokens in (("1 decodes", 1, 1), ("8 decode", 8, 1), ("a prompt of 256", 1, 256)):
        kinds = {"none": [""] * number, "one, all rows": [one] * number}
        if number > 1:
            kinds |= {
                "one, half the rows": [one, ""] * (number // 2),
                "two, half the rows each": [one, two] * (number // 2),
            }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(TURNS):
            for kind, adapters in kinds.items():
                step = batch(adapters, num_tokens)
                start_s = time.process_time()
                runner.run(step)
                times[kind].append(time.process_time() - start_s)
        base_s = statistics.median(times["none"])
        for kind, taken in times.items():
            seconds = statistics.median(taken)
            figures.append(AdapterFigure(rows=rows, adapters=kind, step_ms=seconds * 1000, times_base=seconds / base_s))
    return figures


def main(rank: int = 16, json_file: JsonFile = None) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model")
        decoder = load_model(Path(folder) / "model", dtype="bfloat16")
        decoder.pack()
        table = AdapterTable(decoder, max_adapters=2)
        ids = []
        for seed in (1, 2):
            path = str(write_adapter(decoder, Path(folder) / str(seed), rank=rank, seed=seed))
            start_s = time.process_time()
            ids.append(table.load_adapter(path, table.check(path).adapter_id).adapter_id)
            print(f"loaded in {time.process_time() - start_s:.2f} s of CPU time")
        figures = measure(decoder, ids)
    shown = Table("rows", "adapters", "step, ms", "times none", title=f"rank {rank}, all linear layers")
    for figure in figures:
        shown.add_row(figure.rows, figure.adapters, f"{figure.step_ms:.1f}", f"{figure.times_base:.2f}")
    Console().print(shown)
    write_figures(json_file, rank=rank, figures=[asdict(figure) for figure in figures])


if __name__ == "__main__":
    typer.run(main)
