"""Step times of GPUs that share only a mixture's experts: each computes attention for its own requests (data-parallel
attention), and tokens travel to the GPUs of their experts and back (expert parallelism).

Where it is faster, two halves of a batch alternate: the tokens of one travel while the other is computed, as in
DeepSeek's inference system and SGLang.
"""

from __future__ import annotations

import math

from cluster.simulate.latency.base import StepWork
from cluster.simulate.latency.kernels import HOP_S, ProductTimes
from cluster.simulate.latency.roofline import Roofline
from cluster.simulate.latency.shapes import BFLOAT16, HOST_GPUS, Gpu, ModelShape

EXPERTS = ProductTimes(compute_share=0.42, memory_share=0.83, sharpness=1.0, fixed_s=25e-6)
"""Time for whole experts with equally many tokens each: SGLang with DeepEP on an H100, measured for aiconfigurator
0.12.0."""
NETWORK_SHARE, LINK_SHARE = 0.77, 0.6
"""DeepEP's low-latency kernels on 4 hosts, and its normal ones on one, from the same tables."""
MAX_HOSTS = 4
"""A prompt's token travels once to each host that has experts for it; DeepSeek-V3 picks at most this many hosts."""
MANY_TOKENS = 1024
"""Tokens on one GPU from which on a token travels once per host; fewer tokens travel to each expert by themselves."""
SENT_BYTES = 1.0 + 2.0  # per number of a token: fp8 there, bfloat16 back


class ExpertParallelLatency:
    """A `Latency` of workers of `num_gpus`. Requests are distributed evenly, each on one GPU."""

    def __init__(self, *, gpu: Gpu, model: ModelShape, num_gpus: int, host_s: float = 0.0) -> None:
        assert model.experts is not None
        self.gpu = gpu
        self.model = model
        self.num_gpus = num_gpus
        self._experts = model.experts
        self._host_s = host_s
        self._one = Roofline(gpu=gpu, model=model)
        self._by_tokens: dict[tuple[float, float], float] = {}

    def step_s(self, step: StepWork) -> float:
        own = self._busiest(step)
        travel_s = self.travel_s(own)
        apart_s = self.compute_s(own) + travel_s
        if own.num_rows < 2 and own.num_tokens < MANY_TOKENS:
            return self._host_s + apart_s
        half = StepWork(*(part / 2 for part in own))
        return self._host_s + min(apart_s, max(2 * self.compute_s(half), travel_s))

    def chance(self, key: str) -> None:
        """No variation: all steps of a shape take the same time."""

    def compute_s(self, own: StepWork) -> float:
        """Seconds of computing on one GPU."""
        sizes = (own.num_tokens, own.num_rows)
        taken_s = self._by_tokens.get(sizes)
        if taken_s is None:
            others_s = self._one.parts(own)._replace(experts=0.0, attention=0.0).total()
            taken_s = self._by_tokens[sizes] = others_s + self._experts_s(own.num_tokens)
        return taken_s + self._one.attention_s(own)

    def _experts_s(self, num_tokens: float) -> float:
        """Seconds of a GPU's experts, which get as many tokens as the GPU has itself."""
        model, experts, gpu = self.model, self._experts, self.gpu
        params = 3.0 * experts.width * model.hidden
        touched = experts.touched(num_tokens * self.num_gpus) / self.num_gpus
        flops = 2 * params * experts.num_active * num_tokens
        rate = gpu.fp8_flops if model.experts_computed_in != BFLOAT16 and gpu.fp8_flops else gpu.flops
        seconds = EXPERTS.seconds(flops, params * touched * model.expert_bytes, rate, gpu.memory_rate)
        return (model.layers - experts.num_dense_layers) * seconds

    def travel_s(self, own: StepWork) -> float:
        """Seconds that tokens travel to the experts and back: between hosts over the GPU's network card, within a host
        over its links."""
        experts, gpu, num_hosts = self._experts, self.gpu, math.ceil(self.num_gpus / HOST_GPUS)
        is_many = own.num_tokens >= MANY_TOKENS
        copies = min(experts.num_active, num_hosts, MAX_HOSTS) if is_many else experts.num_active
        num_bytes = own.num_tokens * self.model.hidden * SENT_BYTES
        away_s = num_bytes * copies * (1 - 1 / num_hosts) / (gpu.network_rate * NETWORK_SHARE)
        within = min(self.num_gpus, HOST_GPUS)
        near = experts.num_active / (1 if is_many else num_hosts)
        near_s = num_bytes * near * (1 - 1 / within) / (gpu.link_rate * LINK_SHARE)
        num_layers = self.model.layers - experts.num_dense_layers
        return num_layers * (2 * HOP_S + max(away_s, near_s))

    def _busiest(self, step: StepWork) -> StepWork:
        """The work of the GPU with the most requests."""
        num_prompts = step.num_rows - step.num_single
        singles = self._largest_share(step.num_single)
        prompts = self._largest_share(num_prompts)
        return StepWork(
            num_rows=num_prompts * prompts + step.num_single * singles,
            num_tokens=(step.num_tokens - step.num_single) * prompts + step.num_single * singles,
            num_read=(step.num_read - step.num_single_read) * prompts + step.num_single_read * singles,
            num_attended=(step.num_attended - step.num_single_read) * prompts + step.num_single_read * singles,
            num_single=step.num_single * singles,
            num_single_read=step.num_single_read * singles,
        )

    def _largest_share(self, num_rows: float) -> float:
        return math.ceil(num_rows / self.num_gpus) / num_rows if num_rows else 0.0
