"""Requests of several processes are told in the order in which they came: each tells when, by the same clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from router.admin.requests import ahead_s


def test_a_process_that_is_interrupted_while_it_reads_its_clocks_is_not_off() -> None:
    own = chain([1.0, 3.0, 3.0, 3.0], repeat(3.0))  # interrupted for two seconds between the first two
    assert ahead_s(lambda: 103.0, lambda: next(own)) == 100.0


def test_it_is_the_difference_of_two_clocks_that_go_on() -> None:
    ticks: Iterator[int] = iter(range(100))
    assert abs(ahead_s(lambda: 50.0 + next(ticks), lambda: float(next(ticks))) - 50.0) < 1.0
