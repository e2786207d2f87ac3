"""Simulated speculation: the production code speculates, drafts are right as often as they are said to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.bench.bench_report import Objective
from cluster.simulate.latency.roofline import HOST_S
from cluster.simulate.latency.step_work import step_of
from cluster.simulate.node.simulated_drafts import SimulatedDrafter
from cluster.simulate.results.summary import DraftSummary, Summary, summarise
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import hardware_spec, read_settings
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.towns import sessions, town


def run(acceptance: Sequence[float] = (), *, num: int = 6, thorough: bool = False, **fields: Any) -> SimulationOutcome:
    """Answers of a lightly loaded colocated worker; `simulate` checks their tokens."""
    config = town(prefill=0, decode=1, leaping=True)
    drafter = SimulatedDrafter(source="ngram", acceptance=tuple(acceptance), max_drafts=6, **fields)
    spec = replace(config.spec, drafter=drafter if acceptance else None, thorough=thorough)
    if drafter.latency is not None:
        spec = replace(spec, depth=0)
    return simulate(replace(config, spec=spec), sessions(num=num, rate=1.0, max_output=400))


def summary(outcome: SimulationOutcome) -> Summary:
    return summarise(outcome, Objective())


def drafts(outcome: SimulationOutcome) -> DraftSummary:
    counts = summary(outcome).drafts
    assert counts is not None
    return counts


def tpot_s(outcome: SimulationOutcome) -> float:
    tpot = summary(outcome).report.tpot_s
    assert tpot is not None
    return tpot.mean


def test_right_drafts_save_steps_and_wrong_ones_are_not_made() -> None:
    off, right, wrong = run(), run((1.0,)), run((0.0,))
    assert summary(off).drafts is None
    assert drafts(right).tokens_per_row > 5
    assert drafts(right).num_accepted == drafts(right).num_drafted
    assert tpot_s(right) < tpot_s(off) / 3.5
    assert drafts(wrong).num_accepted == 0
    assert tpot_s(wrong) < tpot_s(off) * 1.1


def test_a_position_is_accepted_as_often_as_was_given() -> None:
    accepted_at = drafts(run((0.9, 0.5), num=20)).accepted_at
    assert accepted_at[:3] == pytest.approx([0.9, 0.45, 0.225], abs=0.06)


@pytest.mark.parametrize("acceptance", [(1.0,), (0.6,)])
def test_a_device_that_reads_all_positions_agrees(acceptance: Sequence[float]) -> None:
    plain, thorough = run(acceptance), run(acceptance, thorough=True)
    assert plain.fingerprint == thorough.fingerprint
    assert drafts(thorough).num_accepted > 0


def test_drafts_of_a_model_take_its_time() -> None:
    settings = read_settings("worker.speculate=model:llama-3-8b")
    spec = hardware_spec(gpu="h100", model="llama-3-70b", tp=4, settings=settings, acceptance=(0.9,))
    assert spec.depth == 0
    assert spec.drafter is not None
    assert spec.drafter.host_s == HOST_S
    latency = spec.drafter.latency
    assert latency is not None
    free, timed = run((1.0,)), run((1.0,), latency=latency)
    assert drafts(timed).num_accepted == drafts(timed).num_drafted > 0
    assert tpot_s(free) < tpot_s(timed)


@pytest.mark.parametrize(("gpu", "model", "tp"), [("h100", "llama-3-8b", 1), ("h200", "deepseek-v3", 16)])
def test_a_head_takes_the_time_of_a_layer(gpu: str, model: str, tp: int) -> None:
    settings = read_settings("worker.speculate=mtp")
    spec = hardware_spec(gpu=gpu, model=model, tp=tp, settings=settings, acceptance=(0.9,))
    assert spec.drafter is not None
    assert spec.drafter.latency is not None
    step = step_of([(1, 1000)])
    assert 0 < spec.drafter.latency.step_s(step) < spec.latency.step_s(step) / 5


@pytest.mark.parametrize(
    ("speculate", "acceptance"),
    [("off", (0.5,)), ("auto", (0.5,)), ("ngram", ()), ("medusa:heads", (0.5,)), ("model:unknown", (0.5,))],
)
def test_drafts_that_cannot_be_simulated_are_refused(speculate: str, acceptance: Sequence[float]) -> None:
    settings = read_settings(f"worker.speculate={speculate}")
    with pytest.raises(Misconfigured):
        hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=settings, acceptance=acceptance)
