"""The source of a simulated worker's drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.simulate.latency.gpus_and_models import model_of
from cluster.simulate.latency.roofline import HOST_S
from cluster.simulate.latency.shapes import ModelShape
from cluster.simulate.latency.step_work import Latency
from cluster.simulate.node.simulated_drafts import SimulatedDrafter
from protos.errors import Misconfigured
from workers.speculation.registry import OFF, SpeculateMode
from workers.worker_config import WorkerConfig

FREE, HEADS = ("ngram", "suffix"), ("eagle", "mtp")


def drafter_of(
    worker: WorkerConfig, acceptance: Sequence[float], shape: ModelShape, step_times: Callable[[ModelShape], Latency]
) -> SimulatedDrafter | None:
    """Returns None if the worker does not speculate. `step_times`: those of other models on its GPUs. Raises
    Misconfigured."""
    mode = SpeculateMode.of(worker.speculate)
    if (mode.kind == OFF) == bool(acceptance):
        raise Misconfigured(
            f"worker.speculate = {worker.speculate!r} and hardware.acceptance = {list(acceptance)}: give both or "
            "neither: speculate = 'ngram' and, for each position of a draft, the chance that it is right if those "
            "before it are, as acceptance = [0.7, 0.6, 0.5] (`baton status` shows it)",
            param="hardware.acceptance",
        )
    if mode.kind == OFF:
        return None
    latency = None
    if mode.kind == "model":
        latency = step_times(model_of(mode.path))
    elif mode.kind in HEADS:  # a layer of the served model, with its vocabulary
        experts = None if shape.experts is None else replace(shape.experts, num_dense_layers=0)
        latency = step_times(replace(shape, layers=1, experts=experts, windows=()))
    elif mode.kind not in FREE:
        raise Misconfigured(
            f"worker.speculate = {worker.speculate!r} is not simulated: choose ngram, suffix, model:NAME, eagle:PATH "
            "or mtp",
            param="worker.speculate",
        )
    return SimulatedDrafter(
        source=mode.kind, acceptance=tuple(acceptance), max_drafts=worker.max_drafts, latency=latency, host_s=HOST_S
    )
