"""Compares the CPU's attention backends, in CPU time of one thread.

    python -m benchmarks.engine.cpu_attention                  compiled and torch, decode and prefill, bf16 and float32
    python -m benchmarks.engine.cpu_attention --json figures.json --plot figures.svg

CPU time leaves out what other processes take of the core, so that a busy machine gives the figures of an idle one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures
from protos.values import KVLayout
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.registry import attention_for
from workers.kv.kv_storage import KVStorage

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 64, 16
NUM_LAYERS = 8  # taken in turn, so that the cache is read from memory
TRIES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Rows that compute `num_new` tokens each behind `num_cached` ones."""

    name: str
    num_rows: int
    num_new: int
    num_cached: int

    @property
    def flops(self) -> int:
        pairs = self.num_new * self.num_cached + self.num_new * (self.num_new + 1) // 2
        return 4 * NUM_HEADS * HEAD_DIM * pairs * self.num_rows

    def num_bytes(self, storage: KVStorage) -> int:
        tokens = self.num_rows * (self.num_new + self.num_cached)
        return 2 * NUM_KV_HEADS * HEAD_DIM * tokens * storage.data.element_size()


CASES = (
    AttentionCase(name="decode, 32 x 576", num_rows=32, num_new=1, num_cached=575),
    AttentionCase(name="decode, 1 x 2048", num_rows=1, num_new=1, num_cached=2047),
    AttentionCase(name="prefill, 4 x 512", num_rows=4, num_new=512, num_cached=0),
    AttentionCase(name="prefill, 512 behind 1536", num_rows=1, num_new=512, num_cached=1536),
)


def filled(case: AttentionCase, dtype: str) -> tuple[KVStorage, AttentionInputs]:
    """Pages in random order, as a cache has them after a while."""
    length = case.num_new + case.num_cached
    pages_of_row = -(-length // BLOCK_SIZE)
    layout = KVLayout.dense(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=dtype
    )
    storage = KVStorage(layout, num_blocks=case.num_rows * pages_of_row)
    storage.data.normal_()
    tables_SB = torch.randperm(storage.num_blocks).int().view(case.num_rows, pages_of_row)
    positions = torch.arange(case.num_cached, length)
    slots_SQ = tables_SB[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return storage, AttentionInputs(
        positions_T=positions.repeat(case.num_rows),
        query_starts=tuple(range(0, case.num_rows * case.num_new + 1, case.num_new)),
        context_lens=(length,) * case.num_rows,
        tables=(GroupTables(slots_T=slots_SQ.flatten(), block_tables_SB=tables_SB),),
        max_query=case.num_new,
        max_context=length,
    )


def best_s(work: Callable[[int], object]) -> float:
    """Of the calling thread's own seconds."""
    seconds = []
    for turn in range(TRIES + 2):
        start = time.thread_time()
        work(turn % NUM_LAYERS)
        seconds.append(time.thread_time() - start)
    return min(seconds[2:])


def attend(name: str, storage: KVStorage, inputs: AttentionInputs) -> Callable[[int], object]:
    """A step's attention over a layer, by the backend called `name`."""
    q_TND = torch.randn(inputs.query_starts[-1], NUM_HEADS, HEAD_DIM).to(storage.data.dtype)
    backend = attention_for(storage, name)
    backend.begin(inputs)
    return lambda layer: backend.attend(layer, q_TND, AttentionOptions(scale=HEAD_DIM**-0.5, window=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures:
    """Of a backend over one layer; `bytes_per_s` are keys and values."""

    case: str
    dtype: str
    backend: str
    seconds: float
    flops_per_s: float
    bytes_per_s: float


def measured() -> list[AttentionFigures]:
    found = []
    for dtype in ("bfloat16", "float32"):
        for case in CASES:
            storage, inputs = filled(case, dtype)
            for name in ("cpu", "torch"):
                seconds = best_s(attend(name, storage, inputs))
                found.append(
                    AttentionFigures(
                        case=case.name,
                        dtype=dtype,
                        backend=name,
                        seconds=seconds,
                        flops_per_s=case.flops / seconds,
                        bytes_per_s=case.num_bytes(storage) / seconds,
                    )
                )
    return found


def show(figures: Sequence[AttentionFigures]) -> None:
    table = Table(title=f"one layer, {NUM_HEADS}/{NUM_KV_HEADS} heads of {HEAD_DIM}, one thread")
    for head in ("case", "dtype", "backend", "ms", "GFLOP/s", "GB/s of keys and values"):
        table.add_column(head, justify="right" if head not in ("case", "dtype", "backend") else "left")
    for one in figures:
        rates = f"{one.flops_per_s / 1e9:.0f}", f"{one.bytes_per_s / 1e9:.1f}"
        table.add_row(one.case, one.dtype, one.backend, f"{one.seconds * 1000:.2f}", *rates)
    Console(width=110).print(table)


def draw(figures: Sequence[AttentionFigures], path: Path) -> None:
    """Milliseconds of each case, a panel for each dtype."""
    dtypes = list(dict.fromkeys(one.dtype for one in figures))
    with drawing(path, size=(6 * len(dtypes), 3.5), columns=len(dtypes), sharey=True) as axes:
        for axis, dtype in zip(axes[0], dtypes, strict=True):
            for number, backend in enumerate(dict.fromkeys(one.backend for one in figures)):
                mine = [one for one in figures if (one.dtype, one.backend) == (dtype, backend)]
                places = [place + 0.4 * number for place in range(len(mine))]
                axis.barh(places, [one.seconds * 1000 for one in mine], height=0.4, label=backend)
                axis.set_yticks([place + 0.2 for place in range(len(mine))], [one.case for one in mine], fontsize=7)
            axis.set_xscale("log")
            axis.set_xlabel("ms of one core")
            axis.set_title(dtype, fontsize=10)
            axis.legend(fontsize=8)


@torch.inference_mode()
def main(
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = measured()
    show(figures)
    write_figures(json_file, figures=[asdict(one) for one in figures])
    if plot is not None:
        draw(figures, plot)


if __name__ == "__main__":
    typer.run(main)
