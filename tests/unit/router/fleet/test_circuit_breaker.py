"""When a worker that fails what it is given gets a pause, and when work again."""

from __future__ import annotations

from router.fleet.circuit_breaker import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, RECENT_S, CircuitBreaker


def tripped(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for failure in range(1, MAX_FAILURES + 1):
        assert breaker.allows(now)
        assert breaker.failed(now) == (failure == MAX_FAILURES)
    return breaker


def test_failures_in_a_row_earn_a_pause() -> None:
    breaker = tripped()
    assert not breaker.allows(FIRST_PAUSE_S - 0.01)
    assert breaker.allows(FIRST_PAUSE_S)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(10):
        for _ in range(MAX_FAILURES - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)


def test_what_was_given_before_the_pause_does_not_lengthen_it() -> None:
    breaker = tripped()
    assert not any(breaker.failed(1.0) for _ in range(50))
    assert breaker.allows(FIRST_PAUSE_S)


def test_a_failure_on_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now = tripped(), FIRST_PAUSE_S
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        assert breaker.failed(now)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        assert not breaker.allows(now + pause_s - 0.01)
        now += pause_s
        assert breaker.allows(now)
    assert pause_s == MAX_PAUSE_S


def test_successes_on_trial_close_it() -> None:
    breaker = tripped()
    breaker.succeeded()
    breaker.succeeded()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(FIRST_PAUSE_S)
    assert breaker.allows(FIRST_PAUSE_S)


def test_failures_at_siblings_count_together_as_long_as_they_are_in_a_row() -> None:
    breaker = CircuitBreaker()
    assert [breaker.failed_elsewhere(0.0, process=1, in_row=number) for number in (1, 2, 1, 2)] == [False] * 4
    assert [breaker.failed_elsewhere(0.0, process=2, in_row=number) for number in (1, 2)] == [False] * 2
    assert breaker.failed(0.0), "two, two and one of our own"
    assert not breaker.failed_elsewhere(FIRST_PAUSE_S / 2, process=2, in_row=3), "it was given before the pause began"
    assert breaker.failed_elsewhere(FIRST_PAUSE_S, process=2, in_row=4), "its trial failed"
    assert not breaker.allows(3 * FIRST_PAUSE_S - 0.01)


def test_what_seldom_fails_at_a_sibling_never_pauses_who_gives_it_nothing() -> None:
    now, seldom, apart = 0.0, CircuitBreaker(), CircuitBreaker()
    for number in range(20):
        assert not seldom.failed_elsewhere(now, process=1, in_row=1), "1,000 have gone well since the last one"
        assert not apart.failed_elsewhere(now, process=number % 8, in_row=1)
        now += RECENT_S / 4
    paused, own = CircuitBreaker(), tripped()
    assert paused.failed_elsewhere(0.0, process=1, in_row=MAX_FAILURES)
    for breaker in (paused, own):
        assert not breaker.failed_elsewhere(RECENT_S, process=1, in_row=1), "whose pause is over is given no longer one"
