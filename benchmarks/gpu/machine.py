"""What a device could do at best, measured: the bandwidth of a copy and the rate of bfloat16 products.

On a CPU the same figures are taken in a hurry, of small pieces: they show that a program runs, and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.engine.floors import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """`bytes_per_s` read plus written by a copy, `flops_per_s` of bfloat16 products."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, need: Needs) -> float:
        return max(need.flops / self.flops_per_s, need.num_bytes / self.bytes_per_s)

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e12:.2f} TB/s copied, {self.flops_per_s / 1e12:.1f} TFLOP/s of bfloat16 products"


def require_gpu(device: str, tiny: bool) -> None:
    """Ends the program with 2 where nothing could be measured."""
    if device == "cuda" and not torch.cuda.is_available():
        print("This is measured on an NVIDIA GPU and torch sees none: nothing was measured.", file=sys.stderr)
        raise SystemExit(2)
    if device != "cuda" and not tiny:
        print(f"On {device} only --tiny is of use: it shows that the program runs.", file=sys.stderr)
        raise SystemExit(2)


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "dry run on a CPU: no figure of it means anything"


def median_s(work: Callable[[], object], device: str, *, recorded: bool = True) -> float:
    """On a GPU with a cold L2: Triton's bench empties it before every run. Work is `recorded` as a CUDA graph, as it is
    in a decode step: launched one by one, small kernels take what the host takes. On a CPU one run, as a dry run."""
    if device == "cuda":
        from triton.testing import do_bench

        work()  # compiles
        if recorded:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            work = graph.replay
        return float(do_bench(work, warmup=20, rep=100, return_mode="median")) / 1e3
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure_machine(device: str) -> GpuRates:
    num_elements, edge = (1 << 29, 8192) if device == "cuda" else (1 << 20, 256)
    source = torch.randn(num_elements, device=device).bfloat16()
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, recorded=False)  # a graph copies at two thirds of the rate
    a, b = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    product_s = median_s(lambda: a @ b, device)
    return GpuRates(bytes_per_s=2 * source.nbytes / copy_s, flops_per_s=2 * edge**3 / product_s)
