"""Measures every Triton kernel on a GPU beside its floor, and prefill beside torch's attention.

    python -m benchmarks.gpu.kernels --json kernels.json --plot kernels.svg
    python -m benchmarks.gpu.kernels --sweep                  the attention kernels with other tiles, too
    python -m benchmarks.gpu.kernels --tiny --device cpu      small parts of it in Triton's interpreter: does it run?

A floor is the larger of two times: the bytes that a kernel must move over the bandwidth of a copy (read and written
bytes counted), its operations over the rate of a matrix product, both measured in the same run on random data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.output import JsonFile, PlotFile, drawing, write_figures

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.floors import Needs
from benchmarks.gpu.machine import GpuRates, measure_machine, median_s, name_of, require_gpu

if TYPE_CHECKING:
    from benchmarks.gpu.cases import KernelCase


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigure:
    """Medians. `peer_s` is torch's best backend of scaled_dot_product_attention on keys and values side by side,
    `rival_s` the same launch in bfloat16. `met` is None where there is no goal."""

    kernel: str
    shape: str
    tile: str
    seconds: float
    floor_s: float
    bytes_per_s: float
    flops_per_s: float
    peer_s: float | None
    rival_s: float | None = None
    met: bool | None = None

    @property
    def share(self) -> float:
        return self.floor_s / self.seconds


def measure(case: KernelCase, machine: GpuRates, device: str) -> KernelFigure:
    seconds = median_s(case.launch, device)
    floor_s = machine.floor_s(Needs(flops=case.num_flops, num_bytes=case.num_bytes))
    goal, rival_s, met = case.goal, None, None
    if goal is not None:
        rival_s = None if goal.rival is None else median_s(goal.rival, device)
        if goal.share or goal.speedup:
            met = floor_s / seconds >= goal.share and (rival_s or seconds) / seconds >= goal.speedup
    return KernelFigure(
        kernel=case.kernel,
        shape=case.shape,
        tile=case.tile,
        seconds=seconds,
        floor_s=floor_s,
        bytes_per_s=case.num_bytes / seconds,
        flops_per_s=case.num_flops / seconds,
        peer_s=min((median_s(peer, device) for peer in usable(case.peers, device)), default=None),
        rival_s=rival_s,
        met=met,
    )


def usable(peers: Sequence[Callable[[], object]], device: str) -> Iterator[Callable[[], object]]:
    """Backends report that they do not serve a shape or a machine only when they are called."""
    for peer in peers:
        try:
            peer()
            if device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            continue
        yield peer


def show(figures: Sequence[KernelFigure], machine: GpuRates, device: str) -> None:
    table = Table(title=f"{name_of(device)}: {machine}")
    for head in (
        "kernel",
        "shape",
        "tile",
        "time",
        "floor",
        "share of it",
        "TB/s",
        "TFLOP/s",
        "torch's attention",
        "in bfloat16",
        "goal",
    ):
        table.add_column(head, justify="left" if head in ("kernel", "shape", "tile", "goal") else "right")
    for one in figures:
        table.add_row(
            one.kernel,
            one.shape,
            one.tile,
            f"{one.seconds * 1e6:,.1f} us",
            f"{one.floor_s * 1e6:,.1f} us",
            f"{one.share:.0%}",
            f"{one.bytes_per_s / 1e12:.2f}",
            f"{one.flops_per_s / 1e12:.0f}",
            "" if one.peer_s is None else f"{one.peer_s * 1e6:,.1f} us",
            "" if one.rival_s is None else f"{one.rival_s * 1e6:,.1f} us",
            "" if one.met is None else "met" if one.met else "MISSED",
        )
    Console(width=160).print(table)


def draw(figures: Sequence[KernelFigure], machine: GpuRates, path: Path, device: str) -> None:
    """A roofline: operations a byte against operations a second, attention kernels as points below the two roofs."""
    with drawing(path, size=(8, 5)) as [[axis]]:
        intensities = [2.0**power for power in range(-4, 13)]
        roofs = [min(machine.flops_per_s, one * machine.bytes_per_s) / 1e12 for one in intensities]
        axis.loglog(intensities, roofs, color="grey", label="measured roofs")
        for one in figures:
            if one.flops_per_s > 0:
                intensity = one.flops_per_s / one.bytes_per_s
                axis.loglog([intensity], [one.flops_per_s / 1e12], "o", label=f"{one.kernel}, {one.shape}")
        axis.set_xlabel("operations a byte that must be moved")
        axis.set_ylabel("TFLOP/s")
        axis.set_title(name_of(device), fontsize=10)
        axis.legend(fontsize=6)


def cases_of(device: str, *, sweep: bool, tiny: bool) -> Iterator[KernelCase]:
    """Made one at a time: their tensors are large."""
    if device != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    cases = import_module("benchmarks.gpu.cases")
    latent, experts = import_module("benchmarks.gpu.latent"), import_module("benchmarks.gpu.experts")
    divisor = 512 if tiny else 1
    return chain(
        cases.attention_cases(device, sweep=sweep, divisor=divisor),
        latent.latent_cases(device, divisor=divisor),
        cases.other_cases(device, divisor=divisor),
        experts.expert_cases(device, divisor=divisor),
    )


def main(
    sweep: Annotated[bool, typer.Option("--sweep", help="Also try the attention kernels with other tiles.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small parts of each case: does the program run?")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run with --tiny.")] = "cuda",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    require_gpu(device, tiny)
    machine = measure_machine(device)
    figures: list[KernelFigure] = []
    failed: list[str] = []
    for case in cases_of(device, sweep=sweep, tiny=tiny):
        what = f"{case.kernel}, {case.shape} {case.tile}"
        try:
            figures.append(measure(case, machine, device))
        except Exception as error:  # it must not hide what the other kernels do
            failed.append(f"{what}: {type(error).__name__}: {error}")
        else:
            print(f"{what}: {figures[-1].seconds * 1e6:,.1f} us, {figures[-1].share:.0%} of the floor", flush=True)
    show(figures, machine, device)
    write_figures(
        json_file,
        machine=asdict(machine),
        figures=[asdict(one) | {"share": one.share} for one in figures],
        failed=failed,
    )
    if plot is not None:
        draw(figures, machine, plot, device)
    if failed:
        print("\n".join(["These failed:", *failed]), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
