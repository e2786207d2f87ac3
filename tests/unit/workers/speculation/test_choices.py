"""How much of a draft is verified: seconds of steps, rates of acceptance, and lengths that raise tokens a second."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from workers.speculation.acceptance import LEAST_RATE, MOST_RATE, PRIOR_RATE, Acceptance, sort_of
from workers.speculation.cost import StepSeconds
from workers.speculation.lengths import LEAST_GAIN, choose_lengths, may_pay
from workers.speculation.proposer import Draft


def draft(length: int = 4, evidence: int = 5, source: str = "ngram") -> Draft:
    return Draft(token_ids=tuple(range(length)), source=source, evidence=evidence)


def observed(**seconds: float) -> StepSeconds:
    """Each number of positions twenty times."""
    cost = StepSeconds()
    for _ in range(20):
        for num, elapsed_s in seconds.items():
            cost.observe(int(num[1:]), elapsed_s)
    return cost


def test_step_times_are_measured_or_interpolated() -> None:
    cost = observed(n1=0.010, n3=0.012, n9=0.030)
    assert cost.seconds(1) == pytest.approx(0.010, rel=0.05)
    assert cost.seconds(9) == pytest.approx(0.030, rel=0.05)
    assert 0.012 < cost.seconds(6) < 0.030
    assert cost.seconds(20) > cost.seconds(9)


def test_before_the_first_step_nothing_is_estimated() -> None:
    cost = StepSeconds()
    assert cost.seconds(4) == 0.0
    cost.observe(1, 0.02)
    assert 0.02 <= cost.seconds(5) < 0.02 * 1.3


def test_one_slow_step_does_not_rule_out_its_number_of_positions() -> None:
    """The machine did something else for a second; many steps of other numbers later drafts are tried again."""
    cost = observed(n1=0.010, n5=0.011)
    cost.observe(5, 1.0)
    assert cost.seconds(5) < 0.020, "no step counts as more than four times the usual"
    once = observed(n1=0.010)
    once.observe(5, 0.1)
    assert once.seconds(5) > 0.06
    for _ in range(2000):
        once.observe(1, 0.010)
    assert once.seconds(5) < 0.015


def test_a_longer_step_is_never_estimated_to_be_shorter() -> None:
    cost = observed(n1=0.012, n2=0.011)
    assert cost.seconds(8) >= cost.seconds(4) > 0


def first_rate(acceptance: Acceptance, request_id: str, one: Draft) -> float:
    return acceptance.rates(request_id, one)[0]


def test_rates_follow_the_sequence_and_its_sort() -> None:
    acceptance = Acceptance()
    assert acceptance.rates("new", draft()) == (PRIOR_RATE, PRIOR_RATE)
    for _ in range(50):
        acceptance.observe("good", draft(), 4)
        acceptance.observe("bad", draft(evidence=40), 0)
    assert min(acceptance.rates("good", draft())) > 0.95
    assert first_rate(acceptance, "bad", draft(evidence=40)) < 0.1
    assert first_rate(acceptance, "new", draft()) > PRIOR_RATE > first_rate(acceptance, "new", draft(evidence=40))
    assert sort_of(draft(evidence=4)) == sort_of(draft(evidence=7)) != sort_of(draft(evidence=8))
    assert first_rate(acceptance, "new", draft(source="suffix")) == PRIOR_RATE


def test_later_positions_have_their_own_rate() -> None:
    acceptance = Acceptance()
    for turn in range(200):
        acceptance.observe(f"r{turn}", draft(evidence=1), 4 if turn % 4 == 0 else 0)
    first, further = acceptance.rates("new", draft(evidence=1))
    assert first == pytest.approx(0.25, abs=0.05)
    assert further > 0.9
    chances = acceptance.chances("new", draft(evidence=1), 4)
    assert chances == pytest.approx([first, first * further, first * further**2, first * further**3])


def test_a_change_of_text_is_noticed() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe("r", draft(), 4)
        acceptance.observe("other", draft(), 4)
    for _ in range(30):
        acceptance.observe("r", draft(), 0)
    assert first_rate(acceptance, "r", draft()) < 0.3
    for _ in range(200):
        acceptance.observe("other", draft(), 4)
    for _ in range(400):
        acceptance.idle("r")
    assert first_rate(acceptance, "r", draft()) > 0.9
    acceptance.end("r")
    assert acceptance.rates("r", draft()) == acceptance.rates("new", draft())


def test_a_sort_that_is_never_chosen_is_tried_again() -> None:
    """A thousand steps later nothing is known of it but the prior."""
    acceptance = Acceptance()
    for turn in range(100):
        acceptance.observe(f"r{turn}", draft(), 0)
    assert first_rate(acceptance, "new", draft()) < 0.1
    for _ in range(2000):
        acceptance.passed(draft())
    assert first_rate(acceptance, "new", draft()) > 0.4


def test_rates_stay_within_their_bounds() -> None:
    acceptance, chance = Acceptance(), Random(0)
    for _ in range(500):
        drafted = draft(length=chance.randrange(1, 9), evidence=chance.randrange(40))
        acceptance.observe("r", drafted, chance.choice((0, len(drafted.token_ids))))
        assert all(LEAST_RATE <= rate <= MOST_RATE for rate in acceptance.rates("r", drafted))


def best_by_hand(chains: list[list[float]], num_rows: int, num_positions: int, most: int, cost: StepSeconds) -> float:
    """The most tokens a second of any choice of lengths."""
    speeds = []
    for lengths in product(*[range(len(chances) + 1) for chances in chains]):
        if sum(lengths) <= most:
            tokens = num_rows + sum(sum(chances[:length]) for length, chances in zip(lengths, chains, strict=True))
            speeds.append(tokens / cost.seconds(num_positions + sum(lengths)))
    return max(speeds)


@pytest.mark.parametrize("seed", range(12))
def test_chosen_lengths_are_the_best_there_are(seed: int) -> None:
    chance = Random(seed)
    rates = [(chance.randrange(5), chance.uniform(0.05, 0.95), chance.uniform(0.05, 0.95)) for _ in range(3)]
    chains = [[first * further**place for place in range(length)] for length, first, further in rates]
    num_rows, num_positions, most = 4, 4 + chance.randrange(3), chance.randrange(13)
    slope_s = chance.choice((0.0001, 0.001, 0.004))
    cost = observed(**{f"n{num}": 0.01 + slope_s * num for num in range(1, 20)})
    lengths = choose_lengths(chains, num_rows=num_rows, num_positions=num_positions, budget=most, seconds=cost.seconds)
    assert sum(lengths) <= most
    assert all(chosen <= len(chances) for chosen, chances in zip(lengths, chains, strict=True))
    tokens = num_rows + sum(sum(chances[:chosen]) for chosen, chances in zip(lengths, chains, strict=True))
    speed = tokens / cost.seconds(num_positions + sum(lengths))
    best, without = best_by_hand(chains, num_rows, num_positions, most, cost), num_rows / cost.seconds(num_positions)
    assert speed == pytest.approx(best, rel=1e-3) or (not any(lengths) and best <= without * LEAST_GAIN)


def test_a_full_batch_gets_no_drafts() -> None:
    cost = observed(**{f"n{num}": 0.001 * num for num in range(1, 30)})
    chances = [0.9, 0.81, 0.73, 0.66]
    assert choose_lengths([chances] * 16, num_rows=16, num_positions=16, budget=100, seconds=cost.seconds) == [0] * 16
    counts = {"num_rows": 16, "num_positions": 16}
    assert not may_pay(**counts, nums_drafts=(16, 64), seconds=cost.seconds), "nor is a proposer queried"
    cheap = observed(**{f"n{num}": 0.01 + 0.0001 * num for num in range(1, 30)})
    assert may_pay(**counts, nums_drafts=(16, 64), seconds=cheap.seconds)
    assert may_pay(**counts, nums_drafts=(1,), seconds=StepSeconds().seconds), "nothing was measured"
