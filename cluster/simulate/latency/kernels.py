"""The times of one GPU's kernels: a few coefficients per GPU, fitted to measured kernels.

products    ((arithmetic / (rate x share))^s + (bytes / (memory rate x share))^s)^(1/s) + fixed: a roofline (Williams,
            Waterman, Patterson, 2009) whose ridge is as sharp as `s`
prefill     arithmetic / (rate x share) + elements x cost of an element + fixed
decode      bytes / (memory rate x share) + rows and heads x cost of each + fixed
all-reduce  bytes / (link rate x share) + fixed

`python -m benchmarks.simulation.step_fit` writes the coefficients to `fitted.json`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.simulate.latency.shapes import HOST_GPUS, Gpu

ELEMENTWISE_SHARE = 0.8  # of the memory's rate: as in NVIDIA's aiconfigurator for norms and activations
ELEMENTWISE_S = 3e-6  # fixed time of one such kernel; same source
HOP_S = 10e-6  # time of one message between hosts; same source (`p2p_latency`)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    compute_share: float
    memory_share: float
    sharpness: float
    fixed_s: float

    def seconds(self, flops: float, num_bytes: float, rate: float, memory_rate: float) -> float:
        sharpness = self.sharpness
        compute_s = flops / (rate * self.compute_share)
        memory_s = num_bytes / (memory_rate * self.memory_share)
        return float((compute_s**sharpness + memory_s**sharpness) ** (1 / sharpness)) + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Times of one layer's attention. `element_s`: per number of a query, with its key, value and output; `row_s`: per
    head of a decoding sequence."""

    compute_share: float
    memory_share: float
    prefill_fixed_s: float
    decode_fixed_s: float
    element_s: float
    row_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTimes:
    """All-reduce among the GPUs of a host, by the faster of two algorithms: `small`, each reads all others' data;
    `large`, each reduces its part and all gather the parts."""

    small_fixed_s: float
    small_share: float
    large_fixed_s: float
    large_share: float

    def seconds(self, gpu: Gpu, num_gpus: int, num_bytes: float) -> float:
        """Across hosts: reduce-scatter within each host, all-reduce over every GPU's network card, all-gather within
        each host."""
        if num_gpus == 1:
            return 0.0
        within = min(num_gpus, HOST_GPUS)
        of_others = num_bytes * (within - 1) / gpu.link_rate
        taken_s = self.large_fixed_s + 2 * of_others / within / self.large_share
        if (num_hosts := math.ceil(num_gpus / HOST_GPUS)) == 1:
            return min(taken_s, self.small_fixed_s + of_others / self.small_share)
        return taken_s + _between_hosts_s(gpu, num_hosts, num_bytes / within)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """`products` and `experts` are by the weights' type (`shapes.DTYPES`)."""

    products: dict[str, ProductTimes]
    experts: dict[str, ProductTimes]
    attention: AttentionTimes
    latent: AttentionTimes
    reduce: AllReduceTimes


def elementwise_s(gpu: Gpu, num_bytes: float, num_kernels: int) -> float:
    return num_bytes / (gpu.memory_rate * ELEMENTWISE_SHARE) + num_kernels * ELEMENTWISE_S


def _between_hosts_s(gpu: Gpu, num_hosts: int, num_bytes: float) -> float:
    """All-reduce over network cards: a ring's bytes, a tree's messages."""
    messages_s = 2 * math.ceil(math.log2(num_hosts)) * HOP_S
    return messages_s + num_bytes * 2 * (num_hosts - 1) / num_hosts / gpu.network_rate


PATH = Path(__file__).with_name("fitted.json")
FITTED = msgspec.convert(json.loads(PATH.read_text(encoding="utf-8"))["gpus"], dict[str, KernelTimes])
