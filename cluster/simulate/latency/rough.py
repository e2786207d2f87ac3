"""Step times that never change, so that a soak's seed means the same cluster after the roofline is fitted again."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.simulate.latency.step_work import StepWork

FLOPS, MEMORY_RATE = 989e12, 0.75 * 3.35e12  # per second, about an H100's
PARAMS, ATTENTION_FLOPS, KV_BYTES = 8.03e9, 4 * 32 * 32 * 128, 131_072  # per token, about an 8B model's
LAUNCH_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Rough:
    """The larger of arithmetic and bytes, plus a launch."""

    compute_share: float = 0.6

    def step_s(self, step: StepWork) -> float:
        flops = 2 * PARAMS * step.num_tokens + ATTENTION_FLOPS * step.num_attended
        moved = 2 * PARAMS + step.num_read * KV_BYTES
        return max(flops / (FLOPS * self.compute_share), moved / MEMORY_RATE) + LAUNCH_S
