"""More is asked than can be done: whoever is let through is answered in time, and no work is thrown away."""

from __future__ import annotations

from benchmarks.gateway.overload import CASES, RatePoint, measure


def at(case: int, *multiples: float, capacity: float) -> list[RatePoint]:
    points = measure(CASES[case], seconds=5.0, capacity=capacity, seeds=(0,), multiples=multiples).points
    return list(points)


def test_scarce_prefill_keeps_its_goodput_at_three_times_the_load() -> None:
    full, flooded = at(0, 1.0, 3.0, capacity=18.0)
    assert flooded.goodput >= 0.9 * full.goodput
    assert flooded.late <= 0.05 * flooded.admitted
    assert flooded.refused > flooded.goodput
    assert not flooded.errors


def test_scarce_decode_keeps_its_goodput_at_three_times_the_load() -> None:
    full, flooded = at(1, 1.0, 3.0, capacity=22.0)
    assert flooded.goodput >= 0.9 * full.goodput
    assert flooded.late <= 0.05 * flooded.admitted
    assert not flooded.errors


def test_colocated_workers_are_balanced_as_far_as_requests_allow() -> None:
    full, flooded = at(2, 1.0, 3.0, capacity=60.0)
    assert flooded.goodput >= full.goodput
    assert flooded.late <= 0.05 * flooded.admitted
    assert not flooded.errors
