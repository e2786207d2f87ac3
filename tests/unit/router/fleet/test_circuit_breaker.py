"""When a worker that fails what it is given gets a pause, and when work again."""

from __future__ import annotations

from router.fleet.circuit_breaker import FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, CircuitBreaker


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


def test_work_given_before_the_pause_does_not_lengthen_it() -> None:
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
