"""The sources of step times, by name: `--latency`."""

from __future__ import annotations

import shlex
from functools import partial

from cluster.simulate.latency.aiconfigurator import Aiconfigurator, Tables
from cluster.simulate.latency.base import Latency
from cluster.simulate.latency.roofline import Roofline
from cluster.simulate.latency.shapes import Gpu, ModelShape
from cluster.simulate.latency.spread import ExpertParallelLatency
from protos.errors import Misconfigured

ROOFLINE, AICONFIGURATOR = "roofline", "aiconfigurator"
SOURCES = (ROOFLINE, AICONFIGURATOR)


class StepTimes:
    """The latency models of one source. Each is made once, and caches what it computed or looked up."""

    def __init__(self, source: str = ROOFLINE) -> None:
        if source not in SOURCES:
            raise Misconfigured(f"--latency {shlex.quote(source)}: choose one of {', '.join(SOURCES)}", param="latency")
        self.source = source
        self._made: dict[tuple[str, str, Gpu, ModelShape, int, float], Latency] = {}

    def of(self, gpu: str, model: str, card: Gpu, shape: ModelShape, *, tp: int, host_s: float) -> Latency:
        """The model for workers of `tp` GPUs, given the names of GPU and model. `host_s` is the host work of a step
        that nothing hides. Raises Misconfigured."""
        key = (gpu, model, card, shape, tp, host_s)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, gpu: str, model: str, card: Gpu, shape: ModelShape, tp: int, host_s: float) -> Latency:
        if self.source == ROOFLINE:
            make = partial(ExpertParallelLatency, num_gpus=tp) if shape.spread else partial(Roofline, tp=tp)
            return make(gpu=card, model=shape, host_s=host_s)
        if shape.spread:
            raise Misconfigured(
                "--dp-attention: --latency aiconfigurator is of layers that all GPUs share: leave one of both out",
                param="dp-attention",
            )
        if shape.whole_experts or shape.windows:
            reason = "--expert-parallel" if shape.whole_experts else f"--model {shlex.quote(model)}"
            raise Misconfigured(f"{reason}: --latency aiconfigurator has no times of it: leave it out", param="latency")
        return Aiconfigurator(Tables(gpu=gpu, model=model, tp=tp, dtype=shape.dtype), host_s=host_s)
