"""The estimators learn lines and factors from noisy observations."""

from __future__ import annotations

import random

import pytest

from router.routing.candidate_columns import Line
from router.routing.fits import LinearFit, SlowdownFactor
from router.routing.predictor import PREFILL as UNOBSERVED

TRUE = Line(fixed_s=0.05, each_s=2e-4)


def taught(line: Line = TRUE, count: int = 100, *, stalls: float = 0.0, prior: Line = UNOBSERVED) -> LinearFit:
    draw, fit = random.Random(0), LinearFit()
    for number in range(count):
        amount = draw.randrange(100, 4000)
        stalled = 30.0 if draw.random() < stalls and number > 20 else 0.0
        fit.observe(amount, line(amount) * draw.uniform(0.9, 1.1) + stalled, prior=prior, now=float(number))
    return fit


def test_without_observations_the_prior_holds() -> None:
    assert LinearFit().line(UNOBSERVED) == UNOBSERVED


def test_a_line_is_learned_from_noisy_times() -> None:
    fit = taught()
    assert fit.line(UNOBSERVED)(2000) == pytest.approx(TRUE(2000), rel=0.1)
    assert fit.errors.so_far.num_observed == 100
    assert fit.errors.so_far.mean_s < 0.05


def test_a_few_stalls_teach_little() -> None:
    assert taught(stalls=0.05).line(UNOBSERVED)(2000) == pytest.approx(TRUE(2000), rel=0.5)


def test_a_change_of_pace_is_learned() -> None:
    fit = taught()
    for number in range(200):
        fit.observe(2000, 5 * TRUE(2000), prior=UNOBSERVED, now=100.0 + number)
    assert fit.line(UNOBSERVED)(2000) == pytest.approx(5 * TRUE(2000), rel=0.15)


def test_old_observations_yield_to_new_ones() -> None:
    fit = taught()
    measured = Line(each_s=1e-3)
    fit.observe(2000, measured(2000), prior=measured, now=100_000.0)
    assert fit.line(measured)(2000) == pytest.approx(measured(2000), rel=0.1)


def test_slowness_is_learned_and_a_stall_teaches_little() -> None:
    draw, pace = random.Random(0), SlowdownFactor()
    for number in range(60):
        amount = draw.randrange(10, 4000)
        stall = 20.0 if number % 20 == 19 else 0.0
        pace.observe(amount, 3 * TRUE(amount) * draw.uniform(0.9, 1.1) + stall, line=TRUE, now=float(number))
    for amount in (0, 4000):
        assert pace.of(TRUE)(amount) == pytest.approx(3 * TRUE(amount), rel=0.35)


def test_one_observation_may_be_chance_and_several_count() -> None:
    pace, odd = SlowdownFactor(), random.Random(0)
    pace.observe(1000, 10 * TRUE(1000), line=TRUE, now=0.0)
    assert pace.ratio == 1.0
    for number in range(10):
        pace.observe(1000, 10 * TRUE(1000), line=TRUE, now=float(number))
    assert pace.ratio == pytest.approx(10, rel=0.3)
    of_a_kind = [SlowdownFactor() for _ in range(20)]
    for number in range(12):
        for each in of_a_kind:
            each.observe(1000, TRUE(1000) * odd.uniform(0.5, 1.5), line=TRUE, now=float(number))
    alike = [each.ratio for each in of_a_kind].count(1.0)
    assert alike > len(of_a_kind) / 2, "workers of one kind seldom look different by chance"


def test_uninformative_amounts_keep_the_prior() -> None:
    """Short prompts that happened to take longer than long ones do not make reading free."""
    fit = LinearFit()
    for number in range(20):
        fit.observe(100 + 50 * number, 0.5 - number / 100, prior=UNOBSERVED, now=float(number))
    line = fit.line(UNOBSERVED)
    assert line(600) == pytest.approx(0.4, rel=0.15)
    assert line.each_s / line.fixed_s == pytest.approx(UNOBSERVED.each_s / UNOBSERVED.fixed_s)


def test_no_part_of_a_line_is_negative() -> None:
    falling, steep = LinearFit(), LinearFit()
    for number in range(50):
        falling.observe(1000 + number, 1.0 - number / 100, prior=UNOBSERVED, now=float(number))
        steep.observe(1000 + number, number / 10, prior=UNOBSERVED, now=float(number))
    for line in (falling.line(UNOBSERVED), steep.line(UNOBSERVED)):
        assert line.fixed_s >= 0
        assert line.each_s >= 0
