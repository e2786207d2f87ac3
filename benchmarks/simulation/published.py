"""Simulated throughput of DeepSeek-V3 beside what others published of theirs, in tokens a second and host of 8 GPUs.

    python -m benchmarks.simulation.published

Steps of workers with data-parallel attention that always have requests, timed as `baton simulate --dp-attention` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.simulate.latency.base import step_of
from cluster.simulate.latency.hardware import gpu_of, model_of
from cluster.simulate.latency.shapes import HOST_GPUS, Gpu
from cluster.simulate.latency.spread import ExpertParallelLatency

H100 = gpu_of("h100")
H800 = replace(H100, link_rate=200e9)
CACHED = 0.563
"""Share of DeepSeek's prompt tokens that were found in its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Each GPU has `rows` sequences, each with `computed` new tokens of `context`. `tokens_per_s`: of a host."""

    what: str
    gpu: Gpu
    num_gpus: int
    rows: int
    computed: int
    context: int
    tokens_per_s: float
    counted: float = 1.0  # published tokens for each that was computed

    def simulated(self) -> float:
        latency = ExpertParallelLatency(
            gpu=self.gpu, model=model_of("deepseek-v3", spread=True), num_gpus=self.num_gpus
        )
        step_s = latency.step_s(step_of([(self.computed, self.context)] * self.rows * self.num_gpus))
        return HOST_GPUS * self.rows * self.computed * self.counted / step_s


DEEPSEEK_DECODE = Published(
    what="DeepSeek, H800: decode, 128 GPUs (144 do not divide 256 experts)",
    gpu=H800, num_gpus=128, rows=88, computed=1, context=4989, tokens_per_s=14_800,
)  # fmt: skip
DEEPSEEK_PREFILL = Published(
    what="DeepSeek, H800: prefill with cache hits, 32 GPUs",
    gpu=H800, num_gpus=32, rows=8, computed=1900, context=4350, tokens_per_s=73_700, counted=1 / (1 - CACHED),
)  # fmt: skip
SGLANG_DECODE = Published(
    what="SGLang, H100: decode, 64 of 72 GPUs",
    gpu=H100, num_gpus=64, rows=256, computed=1, context=2000, tokens_per_s=22_300,
)  # fmt: skip
SGLANG_PREFILL = Published(
    what="SGLang, H100: prefill, 32 GPUs",
    gpu=H100, num_gpus=32, rows=8, computed=2000, context=2000, tokens_per_s=52_300,
)  # fmt: skip
ALL = (DEEPSEEK_PREFILL, DEEPSEEK_DECODE, SGLANG_PREFILL, SGLANG_DECODE)


def main() -> None:
    print(f"{'':66} {'published':>10} {'simulated':>10} {'off by':>7}")
    for one in ALL:
        found = one.simulated()
        print(f"{one.what:66} {one.tokens_per_s:10,.0f} {found:10,.0f} {found / one.tokens_per_s - 1:+7.0%}")


if __name__ == "__main__":
    main()
