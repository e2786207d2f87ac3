"""Policies on a slice of a real trace, through the router's index and the engine's block pool, in virtual time.

The figures are those of `benchmarks/routing/trace.py`; two runs are equal, so a bound that is crossed is a change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.routing.replay import TraceRequest, read_trace
from benchmarks.routing.trace import BLOCK_SIZE, IDEAL, TraceFigures, asked_for, compare, row

POLICIES = ("round_robin", "least_loaded", "power_of_two", "longest_prefix", "prefix_aware", "slo")


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    asked = read_trace(Path(__file__).parent / "mooncake_slice.jsonl", BLOCK_SIZE)
    assert len(asked) == 394
    return asked


@pytest.fixture(scope="module")
def figures(trace: list[TraceRequest]) -> dict[str, TraceFigures]:
    results = compare(trace, POLICIES, num_workers=4, num_blocks=500, utilisation=0.4)
    return {result.policy: result for result in results}


def test_the_default_policy_is_near_the_ideal_and_in_balance(
    trace: list[TraceRequest], figures: dict[str, TraceFigures]
) -> None:
    """With caches of three sizes."""
    sizes = (485, 515)
    more = [compare(trace, ["slo"], num_workers=4, num_blocks=size, utilisation=0.4)[1] for size in sizes]
    for figure in (figures["slo"], *more):
        assert figure.of_ideal >= 0.95, row(figure)
        assert figure.token_imbalance < 1.3, row(figure)
        assert figure.request_imbalance < 1.5, row(figure)  # of requests that are cached nearly whole a worker has more


def test_it_hits_more_than_blind_policies_and_waits_less_than_greedy(
    figures: dict[str, TraceFigures],
) -> None:
    slo = figures["slo"]
    for blind in ("round_robin", "least_loaded", "power_of_two"):
        assert slo.hit_rate > figures[blind].hit_rate, blind
        assert slo.ttft_mean_s < figures[blind].ttft_mean_s, blind
    assert slo.ttft_mean_s < figures["longest_prefix"].ttft_mean_s


def test_one_shared_prompt_waits_no_longer_than_without_learning() -> None:
    """Below saturation, an uncached prompt must not wait for the worker with the cache."""
    asked = asked_for(None, "assistant", num_requests=500, rate=3.4, seed=2)
    _, plain, slo = compare(asked, ["prefix_aware", "slo"], num_workers=8, num_blocks=4000, utilisation=0.5)
    assert slo.hit_rate >= plain.hit_rate, row(slo)
    assert slo.ttft_mean_s <= 1.03 * plain.ttft_mean_s, row(slo)
    assert slo.ttft_p99_s <= 1.03 * plain.ttft_p99_s, row(slo)


def test_no_policy_beats_one_large_worker(figures: dict[str, TraceFigures]) -> None:
    assert max(figures.values(), key=lambda one: one.in_time).policy == IDEAL


def test_a_replay_can_be_repeated(trace: list[TraceRequest]) -> None:
    runs = [compare(trace[:100], ["slo"], num_workers=4, num_blocks=500, utilisation=0.4) for _ in range(2)]
    assert runs[0] == runs[1]
