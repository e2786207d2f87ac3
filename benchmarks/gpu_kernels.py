"""Measures every Triton kernel on this machine's GPU, each beside its floor and, for prefill, beside torch's attention.

    python benchmarks/gpu_kernels.py --json kernels.json --plot kernels.svg
    python benchmarks/gpu_kernels.py --sweep         the attention kernels with other tiles, too

A floor is the larger of two times: the bytes that a kernel must move over the bandwidth of a copy (read and written
bytes counted), its operations over the rate of a matrix product, both measured in the same run on random data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_cases import Case, attention_cases, other_cases
from cluster.bench.hardware import find_hardware, find_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`bytes_per_s` read plus written by a copy, `flops_per_s` of bfloat16 products."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Medians. `peer_s` is torch's best backend of scaled_dot_product_attention on keys and values side by side."""

    kernel: str
    shape: str
    tile: str
    seconds: float
    floor_s: float
    bytes_per_s: float
    flops_per_s: float
    peer_s: float | None

    @property
    def share(self) -> float:
        return self.floor_s / self.seconds


def median_s(work: Callable[[], object]) -> float:
    """With a cold L2: Triton's bench empties it before every run."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=50, rep=200, return_mode="median")) / 1e3


def measure_machine() -> Machine:
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product_s = median_s(lambda: a @ b)
    return Machine(bytes_per_s=2 * source.nbytes / copy_s, flops_per_s=2 * 8192**3 / product_s)


def measure(case: Case, machine: Machine) -> Figure:
    seconds = median_s(case.launch)
    return Figure(
        kernel=case.kernel,
        shape=case.shape,
        tile=case.tile,
        seconds=seconds,
        floor_s=max(case.num_bytes / machine.bytes_per_s, case.num_flops / machine.flops_per_s),
        bytes_per_s=case.num_bytes / seconds,
        flops_per_s=case.num_flops / seconds,
        peer_s=min((median_s(peer) for peer in usable(case.peers)), default=None),
    )


def usable(peers: Sequence[Callable[[], object]]) -> Iterator[Callable[[], object]]:
    """Backends say only when they are called that they do not serve a shape or a machine."""
    for peer in peers:
        try:
            peer()
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        yield peer


def show(figures: Sequence[Figure], machine: Machine) -> None:
    name = torch.cuda.get_device_name()
    table = Table(
        title=f"{name}: {machine.bytes_per_s / 1e12:.2f} TB/s copied, "
        f"{machine.flops_per_s / 1e12:.0f} TFLOP/s of bfloat16 products"
    )
    for head in ("kernel", "shape", "tile", "time", "floor", "share of it", "TB/s", "TFLOP/s", "torch's attention"):
        table.add_column(head, justify="left" if head in ("kernel", "shape", "tile") else "right")
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
        )
    Console(width=160).print(table)


def draw(figures: Sequence[Figure], machine: Machine, path: Path) -> None:
    """A roofline: operations a byte against operations a second, attention kernels as points below the two roofs."""
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 5))
    intensities = [2.0**power for power in range(-4, 13)]
    roofs = [min(machine.flops_per_s, one * machine.bytes_per_s) / 1e12 for one in intensities]
    axis.loglog(intensities, roofs, color="grey", label="measured roofs")
    for one in figures:
        if one.flops_per_s > 0:
            intensity = one.flops_per_s / one.bytes_per_s
            axis.loglog([intensity], [one.flops_per_s / 1e12], "o", label=f"{one.kernel}, {one.shape}")
    axis.set_xlabel("operations a byte that must be moved")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(torch.cuda.get_device_name(), fontsize=10)
    axis.legend(fontsize=6)
    canvas.tight_layout()
    canvas.savefig(path)


def record(figures: Sequence[Figure], machine: Machine) -> dict[str, Any]:
    return {
        "hardware": asdict(find_hardware()),
        "versions": dict(find_versions()),
        "machine": asdict(machine),
        "figures": [asdict(one) | {"share": one.share} for one in figures],
    }


def main(
    sweep: Annotated[bool, typer.Option("--sweep", help="Also try the attention kernels with other tiles.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw a roofline (needs matplotlib).")] = None,
) -> None:
    if not torch.cuda.is_available():
        print("These kernels run on an NVIDIA GPU and torch sees none: nothing was measured.", file=sys.stderr)
        raise typer.Exit(2)
    machine = measure_machine()
    cases = chain(attention_cases("cuda", sweep=sweep), other_cases("cuda"))
    figures = [measure(case, machine) for case in cases]  # made one at a time: their tensors are large
    show(figures, machine)
    if json_file is not None:
        json_file.write_text(json.dumps(record(figures, machine), indent=2) + "\n")
    if plot is not None:
        draw(figures, machine, plot)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
