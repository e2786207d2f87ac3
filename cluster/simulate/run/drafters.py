"""The source of a simulated worker's drafts, from `worker.speculate` and their acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.simulate.latency.base import Latency
from cluster.simulate.latency.hardware import model_of
from cluster.simulate.latency.roofline import HOST_S
from cluster.simulate.latency.shapes import ModelShape
from cluster.simulate.node.drafts import SimulatedDrafter
from protos.errors import Misconfigured
from workers.config import WorkerConfig
from workers.speculation.registry import AUTO, OFF, SpeculateMode

FREE, HEADS = ("ngram", "suffix"), ("eagle", "mtp")
_EXAMPLE = "--acceptance 0.7,0.6,0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingDevice:
    """The served model, and the step times of others on the worker's GPUs; None if the worker's are measured."""

    shape: ModelShape
    step_times: Callable[[ModelShape], Latency] | None


def parse_acceptance(text: str | None) -> tuple[float, ...]:
    """`--acceptance`. Raises Misconfigured."""
    if text is None:
        return ()
    try:
        chances = tuple([float(part) for part in text.split(",")])
    except ValueError:
        chances = ()
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise Misconfigured(
            f"--acceptance {text}: give for each position of a draft the chance that it is right if those before it "
            f"are, between 0 and 1; the last one counts for all further positions: {_EXAMPLE}",
            param="acceptance",
        )
    return chances


def drafter_of(worker: WorkerConfig, acceptance: Sequence[float], device: DraftingDevice) -> SimulatedDrafter | None:
    """None if the worker does not speculate. Raises Misconfigured."""
    mode = SpeculateMode.of(worker.speculate)
    if mode.kind == OFF:
        if acceptance:
            raise Misconfigured(
                "--acceptance without drafts: give --speculate, such as --speculate ngram, or leave it out",
                param="acceptance",
            )
        return None
    if mode.kind == AUTO:
        raise Misconfigured(
            "--speculate auto is off on a GPU: name the source, one of ngram, suffix, model:NAME, eagle:PATH, mtp",
            param="speculate",
        )
    if not acceptance:
        raise Misconfigured(
            f"--speculate {worker.speculate} without the acceptance of its drafts: give it by position, as measured "
            f"with your requests (`baton status` shows it): {_EXAMPLE}",
            param="acceptance",
        )
    return SimulatedDrafter(
        source=mode.kind,
        acceptance=tuple(acceptance),
        max_drafts=worker.max_drafts,
        latency=None if mode.kind in FREE else _latency(mode, device),
        host_s=HOST_S if device.step_times is not None else 0.0,
    )


def _latency(mode: SpeculateMode, device: DraftingDevice) -> Latency:
    """Of a step of the draft model, or of a head: a layer of the served model, with its vocabulary. Raises
    Misconfigured."""
    if device.step_times is None:
        raise Misconfigured(
            f"--speculate {mode.kind}: no steps of a draft model or head were measured: choose ngram or suffix",
            param="speculate",
        )
    if mode.kind == "model":
        return device.step_times(model_of(mode.path))
    if mode.kind not in HEADS:
        raise Misconfigured(
            f"--speculate {mode.kind}: its heads are not simulated: choose ngram, suffix, model:NAME, eagle:PATH or "
            "mtp",
            param="speculate",
        )
    shape = device.shape
    experts = None if shape.experts is None else replace(shape.experts, num_dense_layers=0)
    return device.step_times(replace(shape, layers=1, experts=experts, windows=()))
