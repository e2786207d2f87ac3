"""Where the times of steps come from, by name: `--latency`."""

from __future__ import annotations

import shlex

from cluster.simulate.aiconfigurator import Aiconfigurator, Tables
from cluster.simulate.hardware import gpu_of, model_of
from cluster.simulate.latency import Latency
from cluster.simulate.roofline import Roofline
from protos.errors import Misconfigured

ROOFLINE, AICONFIGURATOR = "roofline", "aiconfigurator"
SOURCES = (ROOFLINE, AICONFIGURATOR)


class StepTimes:
    """The latency models of one source, each made once: they keep what they have computed or looked up."""

    def __init__(self, source: str = ROOFLINE) -> None:
        if source not in SOURCES:
            raise Misconfigured(f"--latency {shlex.quote(source)}: choose one of {', '.join(SOURCES)}", param="latency")
        self.source = source
        self._made: dict[tuple[str, str, str | None, int, float], Latency] = {}

    def of(self, *, gpu: str, model: str, dtype: str | None, tp: int, host_s: float) -> Latency:
        """Of workers of `tp` GPUs, whose steps take `host_s` of host work that nothing hides. Raises Misconfigured."""
        key = (gpu, model, dtype, tp, host_s)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, gpu: str, model: str, dtype: str | None, tp: int, host_s: float) -> Latency:
        card, shape = gpu_of(gpu), model_of(model, dtype)
        if self.source == AICONFIGURATOR:
            return Aiconfigurator(Tables(gpu=gpu, model=model, tp=tp, dtype=shape.dtype), host_s=host_s)
        return Roofline(gpu=card, model=shape, tp=tp, host_s=host_s)
