"""Compares the CPU's products with quantised weights with those in bfloat16, in CPU time of one thread.

    python -m benchmarks.engine.cpu_quantised                  every format at 1, 4, 16, 32 and 512 rows
    python -m benchmarks.engine.cpu_quantised --json figures.json --plot figures.svg

Weights of few rows are read from memory: as many matrices in turn as no cache holds. The floor is the bytes of a weight
over the bandwidth that this thread measured in the same run. CPU time leaves out what other processes take of the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, write_bars
from workers.kernels.cpu.products import PackedFloats
from workers.kernels.cpu.quantised import PackedQuantised
from workers.quantization.bit_stream import pack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

NUM_OUTPUTS, NUM_INPUTS = 4096, 2048
ROWS = (1, 4, 16, 32, 512)
UNCACHED_BYTES = 96 << 20
TRIES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """A format's codes and groups. With minimums or factors its scales have two levels, as the K-quants'."""

    name: str
    bits: int
    group: int = NUM_INPUTS
    zeros: bool = False
    minimums: bool = False
    factors: bool = False

    def weight(self) -> QuantisedWeight:
        generator = torch.Generator().manual_seed(0)
        num_groups = NUM_INPUTS // self.group

        def codes(high: int, num_columns: int) -> torch.Tensor:
            return torch.randint(0, high, (NUM_OUTPUTS, num_columns), generator=generator, dtype=torch.uint8)

        def values() -> GroupValues:
            num_values = NUM_INPUTS // 256 if self.minimums or self.factors else num_groups
            value_OB = torch.rand(NUM_OUTPUTS, num_values, generator=generator).half() * 0.01
            factor_OG = codes(64, num_groups) if self.minimums or self.factors else None
            return GroupValues(value_OB=value_OB, factor_OG=factor_OG)

        return QuantisedWeight(
            bits=self.bits,
            codes_OW=pack_bits(codes(2**self.bits, NUM_INPUTS), self.bits),
            num_inputs=NUM_INPUTS,
            scale=values(),
            group_size=self.group,
            zero=codes(2**self.bits, num_groups) if self.zeros else 0 if self.minimums else 2 ** (self.bits - 1),
            minimum=values() if self.minimums else None,
        )


FORMS = (
    WeightForm(name="int8 by channel", bits=8),
    WeightForm(name="Q8_0", bits=8, group=32),
    WeightForm(name="int4 g128 (GPTQ)", bits=4, group=128),
    WeightForm(name="int4 g128, zeros (AWQ)", bits=4, group=128, zeros=True),
    WeightForm(name="Q4_0", bits=4, group=32),
    WeightForm(name="Q4_K", bits=4, group=32, minimums=True),
    WeightForm(name="Q5_K", bits=5, group=32, minimums=True),
    WeightForm(name="Q6_K", bits=6, group=16, factors=True),
    WeightForm(name="Q3_K", bits=3, group=16, factors=True),
    WeightForm(name="Q2_K", bits=2, group=16, minimums=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    num_bytes: int
    products: tuple[Callable[[torch.Tensor], torch.Tensor], ...]  # of matrices that no cache holds together


def contestant(name: str, num_bytes: int, make: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> Contestant:
    count = max(2, -(-UNCACHED_BYTES // num_bytes))
    return Contestant(name=name, num_bytes=num_bytes, products=tuple(make() for _ in range(count)))


def contestants() -> list[Contestant]:
    floats_OI = torch.randn(NUM_OUTPUTS, NUM_INPUTS).bfloat16()
    found = [contestant("bfloat16", floats_OI.nbytes, lambda: PackedFloats(floats_OI))]
    for form in FORMS:
        weight = form.weight()
        num_bytes = PackedQuantised(weight, torch.bfloat16).num_bytes
        found.append(contestant(form.name, num_bytes, partial(PackedQuantised, weight, torch.bfloat16)))
    return found


def seconds_of(one: Contestant, x_TI: torch.Tensor) -> float:
    products = one.products if len(x_TI) <= 32 else one.products[:1]
    start = time.thread_time()
    for product in products:
        product(x_TI)
    return (time.thread_time() - start) / len(products)


def bytes_per_s() -> float:
    numbers = torch.ones(1 << 25)  # 128 MiB
    start = time.thread_time()
    numbers.sum()
    return numbers.nbytes / (time.thread_time() - start)


@torch.inference_mode()
def main(json: JsonFile = None, plot: PlotFile = None) -> None:
    torch.set_num_threads(1)
    ones = contestants()
    best: dict[tuple[str, int], float] = {}
    bandwidth = 0.0
    for attempt in range(TRIES):  # by turns, so that what else the machine does meets all alike
        bandwidth = max(bandwidth, bytes_per_s())
        for num_rows in ROWS if attempt < 3 else ROWS[:-1]:
            x_TI = torch.randn(num_rows, NUM_INPUTS).bfloat16()
            for one in ones:
                seconds = seconds_of(one, x_TI)
                best[one.name, num_rows] = min(best.get((one.name, num_rows), seconds), seconds)
    table = Table(title=f"{NUM_OUTPUTS} x {NUM_INPUTS}, one thread; memory gives {bandwidth / 1e9:.1f} GB/s")
    for column in ("", "bits a weight", "GB/s at 1 row", "of the floor", *(f"x bf16, {rows}" for rows in ROWS)):
        table.add_column(column, justify="right")
    figures: dict[str, dict[str, float]] = {}
    for one in ones:
        rate = one.num_bytes / best[one.name, 1]
        ratios = {f"{rows} rows": best["bfloat16", rows] / best[one.name, rows] for rows in ROWS}
        figures[one.name] = ratios
        bits = one.num_bytes * 8 / (NUM_OUTPUTS * NUM_INPUTS)
        texts = [f"{ratio:.2f}" for ratio in ratios.values()]
        table.add_row(one.name, f"{bits:.2f}", f"{rate / 1e9:.1f}", f"{rate / bandwidth:.0%}", *texts)
    Console(width=140).print(table)
    write_bars(figures, unit="times the rate of bfloat16", json_file=json, plot=plot)


if __name__ == "__main__":
    typer.run(main)
