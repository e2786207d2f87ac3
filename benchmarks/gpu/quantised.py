"""Measures products with quantised weights on a GPU beside bfloat16's and beside the bandwidth of a copy.

    python -m benchmarks.gpu.quantised --json quantised.json --plot quantised.svg
    python -m benchmarks.gpu.quantised --tiny --device cpu        small ones in Triton's interpreter: does it run?

Weights are an 8B Llama's. Bars, of which each figure says whether it is met: W4A16 at 1 to 16 rows at least 3 times
bfloat16's speed and, at 1 row, 85 % of the floor; FP8 and W8A8 at 8,192 rows at least 1.6 times bfloat16's speed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.floors import Needs
from benchmarks.gpu.machine import GpuRates, measure_machine, median_s, name_of, require_gpu
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

WEIGHTS = {"gate and up": (28672, 4096), "down": (4096, 14336), "q, k and v": (6144, 4096)}
FEW, MANY = (1, 4, 16), 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFigure:
    """Medians. `num_bytes` are the weight's, `floor_s` those over the bandwidth of a copy or, for many rows, the
    operations over the rate of bfloat16 products. `met` is None where there is no bar."""

    format: str
    weight: str
    rows: int
    seconds: float
    bfloat16_s: float
    floor_s: float
    num_bytes: int
    met: bool | None

    @property
    def speedup(self) -> float:
        return self.bfloat16_s / self.seconds


def formats() -> dict[str, Callable[[int, int], QuantisedWeight]]:
    token, groups = ActivationRounding(levels="int8"), ActivationRounding(levels="fp8", group=128)
    return {
        "W4A16": lambda outputs, inputs: weight_of(outputs, inputs, 4, 128),
        "W8A16": lambda outputs, inputs: weight_of(outputs, inputs, 8, 128),
        "Q4_K": lambda outputs, inputs: k_quant_of(outputs, inputs),
        "W8A8": lambda outputs, inputs: replace(weight_of(outputs, inputs, 8, inputs), activations=token),
        "FP8": lambda outputs, inputs: fp8_of(weight_of(outputs, inputs, 8, inputs), ActivationRounding(levels="fp8")),
        "FP8 blocks": lambda outputs, inputs: fp8_of(weight_of(outputs, inputs, 8, 128), groups),
    }


def weight_of(outputs: int, inputs: int, bits: int, group: int) -> QuantisedWeight:
    return QuantisedWeight(
        bits=bits,
        codes_OW=torch.randint(256, (outputs, inputs * bits // 8), dtype=torch.uint8),
        num_inputs=inputs,
        scale=GroupValues(value_OB=torch.rand(outputs, inputs // group).half() / inputs),
        group_size=group,
        zero=2 ** (bits - 1),
    )


def k_quant_of(outputs: int, inputs: int) -> QuantisedWeight:
    factors = torch.randint(64, (outputs, inputs // 32), dtype=torch.uint8)
    values = GroupValues(value_OB=torch.rand(outputs, inputs // 256).half() / inputs, factor_OG=factors)
    return replace(weight_of(outputs, inputs, 4, 32), scale=values, minimum=values, zero=0)


def fp8_of(weight: QuantisedWeight, rounding: ActivationRounding) -> QuantisedWeight:
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.randn(weight.num_outputs, weight.num_inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    return replace(weight, codes_OW=codes, table=table, zero=0, activations=rounding)


def on_device(weight: QuantisedWeight, device: str) -> QuantisedWeight:
    def moved(values: GroupValues | None) -> GroupValues | None:
        if values is None:
            return None
        factors = None if values.factor_OG is None else values.factor_OG.to(device)
        return GroupValues(value_OB=values.value_OB.to(device), factor_OG=factors)

    scale = moved(weight.scale)
    assert scale is not None
    table = None if weight.table is None else weight.table.to(device)
    return replace(weight, codes_OW=weight.codes_OW.to(device), scale=scale, minimum=moved(weight.minimum), table=table)


def is_met(format_name: str, rows: int, speedup: float, share: float) -> bool | None:
    if format_name == "W4A16" and rows in FEW:
        return speedup >= 3 and (rows > 1 or share >= 0.85)
    return speedup >= 1.6 if rows == MANY and format_name in ("W8A8", "FP8", "FP8 blocks") else None


def figures_of(machine: GpuRates, device: str, *, tiny: bool) -> Iterator[QuantisedFigure]:
    if device != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    quantised_product = import_module("workers.kernels.quantised.product_choice").quantised_product
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter multiplies bfloat16 wrongly
    for weight_name, shape in list(WEIGHTS.items())[: 1 if tiny else None]:
        outputs, inputs = (64, 256) if tiny else shape
        plain_OI = torch.randn(outputs, inputs, device=device).to(dtype)
        for format_name, make in formats().items():
            product = quantised_product(on_device(make(outputs, inputs), device))
            assert product is not None
            for rows in (1, 4) if tiny else (*FEW, 64, MANY):
                x_TI = torch.randn(rows, inputs, device=device).to(dtype)
                seconds = median_s(partial(product, x_TI), device)
                plain_s = median_s(partial(F.linear, x_TI, plain_OI), device)
                num_bytes = product.codes.num_bytes
                moved = num_bytes + x_TI.nbytes + rows * outputs * x_TI.itemsize
                floor_s = machine.floor_s(Needs(flops=2 * rows * outputs * inputs, num_bytes=moved))
                yield QuantisedFigure(
                    format=format_name,
                    weight=weight_name,
                    rows=rows,
                    seconds=seconds,
                    bfloat16_s=plain_s,
                    floor_s=floor_s,
                    num_bytes=num_bytes,
                    met=None if tiny else is_met(format_name, rows, plain_s / seconds, floor_s / seconds),
                )


def show(figures: Sequence[QuantisedFigure], machine: GpuRates, device: str) -> None:
    table = Table(title=f"{name_of(device)}: {machine}")
    for head in ("format", "weight", "rows", "time", "bfloat16", "times its speed", "share of the floor", "bar"):
        table.add_column(head, justify="left" if head in ("format", "weight", "bar") else "right")
    for one in figures:
        table.add_row(
            one.format,
            one.weight,
            str(one.rows),
            f"{one.seconds * 1e6:,.1f} us",
            f"{one.bfloat16_s * 1e6:,.1f} us",
            f"{one.speedup:.2f}",
            f"{one.floor_s / one.seconds:.0%}",
            "" if one.met is None else "met" if one.met else "MISSED",
        )
    Console(width=160).print(table)


def draw(figures: Sequence[QuantisedFigure], path: Path, device: str) -> None:
    with drawing(path, size=(8, 5)) as [[axis]]:
        for name in dict.fromkeys(one.format for one in figures):
            mine = [one for one in figures if one.format == name and one.weight == figures[0].weight]
            axis.plot([one.rows for one in mine], [one.speedup for one in mine], "o-", label=name)
        axis.set_xscale("log")
        axis.set_xlabel("rows")
        axis.set_ylabel("times bfloat16's speed")
        axis.set_title(f"{figures[0].weight}, {name_of(device)}", fontsize=10)
        axis.legend(fontsize=7)


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="Small weights: does the program run?")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run with --tiny.")] = "cuda",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    require_gpu(device, tiny)
    machine = measure_machine(device)
    figures = []
    for figure in figures_of(machine, device, tiny=tiny):
        figures.append(figure)
        what = f"{figure.format}, {figure.weight}, {figure.rows} rows"
        print(f"{what}: {figure.seconds * 1e6:,.1f} us, bfloat16 {figure.bfloat16_s * 1e6:,.1f} us", flush=True)
    show(figures, machine, device)
    write_figures(
        json_file, machine=asdict(machine), figures=[asdict(one) | {"speedup": one.speedup} for one in figures]
    )
    if plot is not None:
        draw(figures, plot, device)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
