"""Decisions of the planner: a test for each complaint about another system, and a cluster that is planned for a day."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cluster.planner.decide import decide
from cluster.planner.planner_values import (
    FleetDecision,
    FleetLimits,
    FleetObjective,
    LearnedLoad,
    LoadFactors,
    Observation,
    PlannerMemory,
    PlannerPace,
    PoolObservation,
    TooSmall,
)
from cluster.planner.queueing import attainment, erlang_c, shares_in_time
from protos.values import WorkerRole

P, D, C = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.COLOCATED
OBJECTIVE = FleetObjective(ttft_s=1.0, tpot_s=0.05, attainment=0.95)
LIMITS = FleetLimits(least={P: 1, D: 1}, most={P: 12, D: 12}, devices={P: 1, D: 1}, max_devices=16)
READER = PoolObservation(serving=1, prefill_tokens_per_s=10_000.0)
WRITER = PoolObservation(serving=1, step_fixed_s=0.02, step_each_s=0.0005, num_seats=256)
START = 1_800_000_000.0
Counts = Mapping[WorkerRole, int]


def seen(counts: Counts, rate: float, *, at_s: float = START, late: float | None = None, **changes: Any) -> Observation:
    """A minute of `rate` requests a second; `late`: share of them, None: what the model says."""
    num = round(60 * rate)
    made = Observation(
        at_s=at_s,
        window_s=60.0,
        num_arrived=num,
        num_ended=num,
        num_late=0,
        num_waiting=0,
        uncached_tokens=(500.0, 1000.0, 1500.0, 2000.0, 3000.0),
        answer_tokens=200.0,
        pools={P: replace(READER, serving=counts[P]), D: replace(WRITER, serving=counts[D])},
    )
    if late is None:
        late = 1.0 - attainment(counts, rate, made, OBJECTIVE)
    return replace(made, num_late=round(num * late), **changes)


def planned(observation: Observation | None, desired: Counts, memory: PlannerMemory | None = None) -> FleetDecision:
    now = observation.at_s if observation is not None else START
    return decide(observation, OBJECTIVE, LIMITS, memory or PlannerMemory(), now=now, desired=desired)


def settled(rate: float, *, factor: float = 1.0) -> PlannerMemory:
    """Ten minutes of this rate have passed, and no worker has gone for long."""
    peaks = tuple((START - 60.0 * ago, rate) for ago in range(5, 0, -1))
    return PlannerMemory(peaks=peaks, learned=LearnedLoad(factors=LoadFactors(prefill=factor, decode=factor)))


def day(
    rate_of: Callable[[float], float], counts: Counts, *, hours: float, truth: float = 1.0, answer: float = 200.0
) -> tuple[list[dict[WorkerRole, int]], list[float]]:
    """The planned fleet and the attainment of each minute. The real load is `truth` times the model's; workers start
    within the minute."""
    memory, fleet, fleets, shares = PlannerMemory(), dict(counts), list[dict[WorkerRole, int]](), list[float]()
    for minute in range(int(60 * hours)):
        at_s = START + 60.0 * minute
        rate = rate_of(minute / 60.0)
        observation = replace(seen(fleet, rate, at_s=at_s, late=0.0), answer_tokens=answer)
        first, gaps = shares_in_time(fleet, truth * rate, observation, OBJECTIVE, LoadFactors())
        share = first * gaps
        observation = replace(
            observation,
            num_late=round(observation.num_ended * (1.0 - share)),
            num_slow=round(observation.num_ended * first * (1.0 - gaps)),
        )
        decision = decide(observation, OBJECTIVE, LIMITS, memory, now=at_s, desired=fleet)
        fleet, memory = dict(decision.counts), decision.memory
        fleets.append(fleet)
        shares.append(share)
    return fleets, shares


def changes(fleets: list[dict[WorkerRole, int]]) -> int:
    return sum(before != after for before, after in pairwise(fleets))


# -- complaints --------------------------------------------------------------------------------------------------------


def test_no_traffic_reaches_the_least_fleet() -> None:
    """dynamo#6985: without traffic the metrics were no numbers, and nothing ever became smaller."""
    fleets, _ = day(lambda hour: 0.0, {P: 4, D: 4}, hours=3)
    assert fleets[-1] == {P: 1, D: 1}


def test_a_constant_load_settles() -> None:
    """dynamo#9294: two workers, one worker, two workers, ..."""
    for truth in (0.8, 1.0, 1.3):
        fleets, shares = day(lambda hour: 12.0, {P: 2, D: 2}, hours=8, truth=truth)
        assert changes(fleets[-240:]) <= 4, "at most one an hour"
        assert min(shares[-240:]) >= OBJECTIVE.attainment


def noisy_fleets(rate: float, truth: float, *, hours: float) -> list[dict[WorkerRole, int]]:
    """The planned fleet every 30 s, with random arrivals and lateness."""
    rng = random.Random(1)
    memory, fleet, fleets = PlannerMemory(), {P: 2, D: 2}, list[dict[WorkerRole, int]]()
    window: deque[int] = deque(maxlen=2)

    def chance(num: int, share: float) -> int:
        return sum(rng.random() < share for _ in range(num))

    for step in range(int(120 * hours)):
        at_s = START + 30.0 * step
        window.append(chance(round(rate * 30.0 * 20), 1 / 20))
        num = sum(window)
        observation = replace(seen(fleet, rate, at_s=at_s, late=0.0), num_arrived=num, num_ended=num)
        first, gaps = shares_in_time(fleet, truth * rate, observation, OBJECTIVE, LoadFactors())
        num_late = chance(num, 1.0 - first)
        num_slow = chance(num - num_late, 1.0 - gaps)
        observation = replace(observation, num_late=num_late + num_slow, num_slow=num_slow)
        decision = decide(observation, OBJECTIVE, LIMITS, memory, now=at_s, desired=fleet)
        fleet, memory = dict(decision.counts), decision.memory
        fleets.append(fleet)
    return fleets


@pytest.mark.parametrize("rate", [8.0, 12.0])
def test_a_constant_load_settles_despite_chance(rate: float) -> None:
    """Twenty changes in eight hours: what was learned faded, a worker went, and came again a minute later."""
    fleets = noisy_fleets(rate, 1.3, hours=8)
    assert changes(fleets[4 * 120 :]) <= 4, "at most one an hour"


def test_a_fleet_too_small_is_tried_again_at_a_lighter_load() -> None:
    first, other = (
        TooSmall(counts=counts, prompt_rate=6.0 * 1600.0, answer_rate=6.0 * 200.0, at_s=START - 60.0, hold_s=3600.0)
        for counts in ({P: 2, D: 3}, {P: 3, D: 2})
    )
    fleet, memory = {P: 3, D: 3}, replace(settled(6.0), learned=LearnedLoad(too_small=(first, other)))
    remembered = planned(seen(fleet, 6.0), fleet, memory)
    assert remembered.counts == fleet
    assert remembered.reason.endswith("did not 60 s ago: not tried again for 3540 s")
    lighter = replace(memory, peaks=settled(3.0).peaks)
    assert planned(seen(fleet, 3.0), fleet, lighter).counts != fleet
    later = replace(memory, learned=LearnedLoad(too_small=(replace(first, at_s=START - 3601.0), other)))
    assert planned(seen(fleet, 6.0), fleet, later).counts != fleet
    shorter = replace(seen(fleet, 6.0), uncached_tokens=(100.0, 200.0, 300.0))
    assert planned(shorter, fleet, memory).counts != fleet, "another load: its prompts are short"


def test_a_fleet_above_its_limits_shrinks_anyway() -> None:
    fleet, limits = {P: 4, D: 4}, replace(LIMITS, most={P: 2, D: 2})
    refused = TooSmall(counts={P: 3, D: 3}, prompt_rate=9.0, answer_rate=9.0, at_s=START - 60.0, hold_s=3600.0)
    memory = replace(settled(6.0), learned=LearnedLoad(too_small=(refused,)))
    decision = decide(seen(fleet, 6.0), OBJECTIVE, limits, memory, now=START, desired=fleet)
    assert decision.counts == {P: 2, D: 2}


def test_lateness_before_any_known_speed_is_ignored() -> None:
    """A load that one worker serves ordered three, once the first prompt was measured."""
    fleet, memory = {P: 1, D: 1}, PlannerMemory()
    blind = {P: PoolObservation(serving=1), D: PoolObservation(serving=1)}
    for minute in range(10):
        late = replace(seen(fleet, 3.0, late=0.5, at_s=START + 60.0 * minute), pools=blind)
        memory = planned(late, fleet, memory).memory
    assert memory.learned.factors == LoadFactors()
    assert planned(seen(fleet, 3.0, late=0.0, at_s=START + 600.0), fleet, memory).counts == fleet


def test_a_worker_that_did_not_come_is_the_reason_not_the_limits() -> None:
    fleet = {P: 2, D: 2}
    memory = replace(settled(20.0), gave_up_until_s={P: START + 600.0, D: START + 600.0})
    decision = planned(seen(fleet, 20.0, late=0.6), fleet, memory)
    assert decision.counts == fleet
    assert decision.reason.endswith(
        "no more workers are ordered of prefill for 600 s and decode for 600 s: the last ones did not come"
    )


def test_a_profiled_day_has_one_weight_however_often_it_is_seen() -> None:
    """At a decision every 15 s each minute was learned four times."""
    weights = []
    for period_s in (60.0, 15.0):
        fleet, at_s = {P: 2, D: 2}, START - START % 900.0
        memory = PlannerMemory(learned=LearnedLoad(profile=(5.0,) * 96))
        for step in range(int(900.0 / period_s)):
            memory = planned(seen(fleet, 10.0, at_s=at_s + step * period_s), fleet, memory).memory
        weights.append(memory.learned.profile[int(at_s % 86400.0 // 900.0)])
    assert weights[1] == pytest.approx(weights[0], rel=0.03)


def test_a_worker_that_never_starts_is_given_up() -> None:
    """dynamo#14251: one pod that could not be scheduled froze the planner."""
    fleet = {P: 1, D: 4}
    stuck = replace(READER, serving=1, pending_since_s=(START - 3600.0,))
    busy = seen(fleet, 12.0, late=0.3)
    observation = replace(busy, pools={P: stuck, D: busy.pools[D]})
    decision = planned(observation, fleet | {P: 2})
    assert decision.counts[P] == 1, "the same worker is not ordered again at once"
    assert decision.memory.gave_up_until_s[P] > START
    quiet = replace(observation, num_arrived=0, num_ended=0, num_late=0)
    assert planned(quiet, fleet | {P: 2}, settled(0.0)).counts[D] < 4, "the rest may still become smaller"


@pytest.mark.parametrize("observation", [None, seen({P: 4, D: 4}, 0.0, at_s=START - 300.0)])
def test_a_missing_or_stale_observation_changes_nothing(observation: Observation | None) -> None:
    """ray#58933: a list that timed out read as "no node is busy", and all of them were ended."""
    decision = decide(observation, OBJECTIVE, LIMITS, settled(0.0), now=START, desired={P: 4, D: 4})
    assert decision.counts == {P: 4, D: 4}
    assert "no decision without a fresh observation" in decision.reason


def test_overload_that_shows_in_the_line_alone_adds_workers() -> None:
    """dynamo#10528: the objective's loop left out the time in the queue."""
    fleet = {P: 1, D: 2}
    calm = seen(fleet, 3.0, late=0.0)
    assert planned(calm, fleet).counts == fleet
    assert sum(planned(replace(calm, num_waiting=400), fleet).counts.values()) > 3


def test_late_requests_add_workers_despite_the_model() -> None:
    fleet, memory = {P: 2, D: 2}, PlannerMemory()
    for minute in range(10):
        observation = seen(fleet, 6.0, late=0.4, at_s=START + 60.0 * minute)
        decision = planned(observation, fleet, memory)
        memory = decision.memory
        if decision.counts != fleet:
            break
    assert sum(decision.counts.values()) > 4


def test_slow_answers_add_decode_workers_and_no_others() -> None:
    fleet, memory = {P: 2, D: 2}, PlannerMemory()
    for minute in range(10):
        observation = seen(fleet, 6.0, late=0.4, at_s=START + 60.0 * minute)
        decision = planned(replace(observation, num_slow=observation.num_late), fleet, memory)
        memory = decision.memory
        if decision.counts != fleet:
            break
    assert decision.counts[D] > 2
    assert decision.counts[P] <= 2


def test_lateness_before_growth_does_not_grow_the_fleet_again() -> None:
    fleet, memory, at_s = {P: 2, D: 2}, PlannerMemory(), START
    while (decision := planned(seen(fleet, 6.0, late=0.4, at_s=at_s), fleet, memory)).counts == fleet:
        memory, at_s = decision.memory, at_s + 60.0
    grown = decision.counts
    for after_s in range(5, 60, 5):
        decision = planned(seen(grown, 6.0, late=0.4, at_s=at_s + after_s), grown, decision.memory)
        assert decision.counts == grown, decision.reason


def test_one_heavy_hour_is_not_paid_for_all_day() -> None:
    """A large fleet reveals no error of the model, so the learned correction fades."""
    memory, fleet = PlannerMemory(), {P: 2, D: 2}
    for minute in range(12 * 60):
        at_s = START + 60.0 * minute
        observation = seen(fleet, 6.0, at_s=at_s, late=0.4 if minute < 10 else 0.0)
        decision = decide(observation, OBJECTIVE, LIMITS, memory, now=at_s, desired=fleet)
        fleet, memory = dict(decision.counts), decision.memory
        if minute == 10:
            assert sum(fleet.values()) > 4
    fresh, _ = day(lambda hour: 6.0, {P: 2, D: 2}, hours=12)
    assert fleet == fresh[-1]


def test_a_smaller_fleet_must_serve_the_peak_of_the_last_minutes() -> None:
    fleet = {P: 3, D: 3}
    calm, after_peak = settled(6.0), settled(20.0)
    assert sum(planned(seen(fleet, 6.0), fleet, calm).counts.values()) < 6
    assert planned(seen(fleet, 6.0), fleet, after_peak).counts == fleet


def test_nothing_goes_while_a_worker_leaves_or_rests() -> None:
    fleet = {P: 4, D: 4}
    observation = seen(fleet, 1.0)
    leaving = replace(observation, pools={P: replace(READER, serving=4, num_leaving=1), D: observation.pools[D]})
    assert planned(leaving, fleet, settled(1.0)).counts == fleet
    rested = replace(settled(1.0), shrunk_s=START - 60.0)
    decision = planned(observation, fleet, rested)
    assert decision.counts == fleet
    assert "the last one went 60 s ago" in decision.reason


def test_an_operators_change_holds_until_its_time() -> None:
    """dynamo#4420: two owners of one number."""
    fleet = {P: 4, D: 4}
    manual = replace(settled(1.0), manual_until_s=START + 600.0)
    decision = planned(seen(fleet, 1.0), fleet, manual)
    assert decision.counts == fleet
    assert decision.reason == "an operator's change holds for 600 s more"
    assert planned(seen(fleet, 1.0), fleet, settled(1.0)).counts != fleet


def test_an_operators_late_worker_is_not_cancelled() -> None:
    wanted = {P: 2, D: 4}
    late = seen({P: 1, D: 4}, 1.0)
    late = replace(late, pools={D: late.pools[D], P: replace(READER, serving=1, pending_since_s=(START - 3600.0,))})
    decision = planned(late, wanted, replace(settled(1.0), manual_until_s=START + 600.0))
    assert decision.counts == wanted


def test_an_idle_pool_gives_a_worker_to_a_late_one() -> None:
    fleet = {P: 4, D: 2}
    writing = replace(seen(fleet, 14.0, late=0.4), answer_tokens=300.0, uncached_tokens=(100.0, 200.0, 300.0))
    limits = replace(LIMITS, max_devices=6)
    decision = decide(writing, OBJECTIVE, limits, PlannerMemory(), now=START, desired=fleet)
    assert sum(decision.counts.values()) <= 6
    assert decision.flips, decision.reason
    assert set(decision.flips) == {(P, D)}


def test_limits_hold_whatever_the_load_is() -> None:
    fleet = {P: 2, D: 2}
    decision = planned(seen(fleet, 500.0, late=1.0, num_waiting=5000), fleet)
    assert sum(decision.counts.values()) <= LIMITS.max_devices
    assert all(decision.counts[role] <= LIMITS.most[role] for role in decision.counts)
    assert sum(decision.counts.values()) > 4


def test_unknown_speeds_decide_nothing() -> None:
    fleet = {P: 2, D: 2}
    blind = replace(seen(fleet, 5.0, late=0.0), pools={P: PoolObservation(serving=2), D: PoolObservation(serving=2)})
    assert planned(blind, fleet).counts == fleet


# -- a day -------------------------------------------------------------------------------------------------------------


def wave(hour: float) -> float:
    return 2.0 + 16.0 * (0.5 - 0.5 * math.cos(2.0 * math.pi * hour / 24.0))


def test_a_day_is_served_for_less_than_its_peak_costs() -> None:
    fleets, shares = day(wave, {P: 2, D: 2}, hours=48)
    rates = [wave(minute / 60.0) for minute in range(48 * 60)]
    served = sum(share * rate for share, rate in zip(shares, rates, strict=True)) / sum(rates)
    assert served >= OBJECTIVE.attainment
    used = sum(sum(fleet.values()) for fleet in fleets[24 * 60 :])
    peak = max(sum(fleet.values()) for fleet in fleets[24 * 60 :]) * 24 * 60
    assert used <= 0.8 * peak


def test_the_second_day_grows_before_the_load_does() -> None:
    """A load that stands on at nine: the profile orders workers while the rate is still low."""
    steps = [15.0 if 9.0 <= hour % 24.0 < 18.0 else 5.0 for hour in (minute / 60.0 for minute in range(48 * 60))]
    _, shares = day(lambda hour: steps[int(hour * 60)], {P: 2, D: 2}, hours=48)
    first, second = (sum(shares[24 * 60 * offset + 9 * 60 :][:10]) for offset in (0, 1))
    assert second > first


def test_erlangs_formula() -> None:
    """Known values (Gross and Harris, "Fundamentals of Queueing Theory"): one server waits with its load."""
    assert erlang_c(1, 0.6) == pytest.approx(0.6)
    assert erlang_c(2, 1.0) == pytest.approx(1.0 / 3.0)
    assert erlang_c(500, 450.0) < 0.02
    assert erlang_c(3, 3.0) == 1.0


def test_without_a_fitting_fleet_the_queue_stays_bounded() -> None:
    """A prompt alone takes longer than the objective; two workers cannot keep up with two prompts' time a second."""
    slow = {P: replace(READER, prefill_tokens_per_s=900.0), D: WRITER}
    overloaded = seen({P: 1, D: 1}, 1.5, late=1.0, uncached_tokens=(1000.0,), pools=slow, num_waiting=40)
    decision = planned(overloaded, {P: 1, D: 1})
    assert decision.counts[P] >= 3
    assert decision.counts[D] == 1


def test_useless_workers_are_not_added() -> None:
    """An operator was advised three prefill workers for 1.5 % in time, as one had."""
    strict, fleet = replace(OBJECTIVE, ttft_s=0.005), {P: 1, D: 1}
    observation = replace(seen(fleet, 0.5, late=0.99), uncached_tokens=(10.0, *[3000.0] * 99))
    decision = decide(observation, strict, LIMITS, settled(0.5), now=START, desired=fleet)
    assert decision.counts == fleet
    assert decision.reason.endswith("no fleet near by that the limits allow keeps the objective")


def test_a_new_fleet_does_not_shrink_before_its_load_is_known() -> None:
    """`settle_s` below the window of an observation let the first look end workers, 3 s after the start."""
    pace, memory, fleet = PlannerPace(settle_s=40.0), PlannerMemory(), {P: 1, D: 3}
    gone_after_s = None
    for second in range(0, 120, 3):
        decision = decide(
            seen(fleet, 0.0, at_s=START + second),
            OBJECTIVE,
            LIMITS,
            memory,
            now=START + second,
            desired=fleet,
            pace=pace,
        )
        memory = decision.memory
        if decision.counts != fleet:
            gone_after_s = second
            break
    assert gone_after_s == 42


def test_a_pool_sleeps_and_wakes_when_the_other_is_late() -> None:
    """Decode workers compute the prompts of a low load (ADR 28), and are too slow for those of a higher one."""
    limits = FleetLimits(least={P: 0, D: 1}, most={P: 4, D: 4}, devices={P: 1, D: 1}, max_devices=8)
    both = replace(WRITER, prefill_tokens_per_s=10_000.0)

    def decided(rate: float, counts: Counts, memory: PlannerMemory, **changes: Any) -> FleetDecision:
        observation = seen(counts, rate, pools={P: replace(READER, serving=counts[P]), D: both}, **changes)
        return decide(observation, OBJECTIVE, limits, memory, now=START, desired=counts)

    asleep = decided(0.2, {P: 1, D: 1}, settled(0.2), late=0.0)
    assert asleep.counts == {P: 0, D: 1}, asleep.reason
    awake = decided(8.0, {P: 0, D: 1}, PlannerMemory(), late=0.6, num_waiting=30)
    assert awake.counts[P] >= 1, awake.reason
