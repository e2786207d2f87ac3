"""A flapping state is logged when it changes, and then once a minute."""

from __future__ import annotations

import logging

import pytest

from router.log_throttle import PERIOD_S, OutageLog, RareLog


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    return Clock()


def test_an_outage_has_a_line_at_its_beginning_and_at_its_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("test"), clock)
    outage.back("here")
    for _ in range(3):
        clock.now_s += 1
        outage.lost("why", "away")
    assert outage.reason == "why"
    outage.back("here")
    assert outage.reason == ""
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "away"), ("INFO", "here")]


def test_a_flapping_fault_has_two_lines_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("test"), clock)
    for _ in range(600):  # five minutes
        outage.lost("why", "away")
        clock.now_s += 0.25
        outage.back("here")
        clock.now_s += 0.25
    lines = [record.message for record in caplog.records]
    assert lines[:2] == ["away", "here"]
    assert 8 <= len(lines) <= 12
    assert lines[2] == "away (lost 120 times in the last 60 s)"


def test_a_change_that_came_too_early_for_a_line_has_it_later(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("test"), clock)
    outage.lost("why", "away")
    outage.back("here")
    outage.lost("why", "away again")
    assert [record.message for record in caplog.records] == ["away", "here"]
    clock.now_s += PERIOD_S
    outage.lost("why", "away again")
    outage.lost("why", "away again")
    assert [record.message for record in caplog.records][2:] == ["away again"]


def test_many_like_events_have_a_line_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    rare = RareLog(logging.getLogger("test"), clock)
    assert rare.recent == ""
    for _ in range(61):
        rare.note("odd")
        clock.now_s += 1
    assert [record.message for record in caplog.records] == ["odd", "odd (59 more in the last 60 s)"]
    assert rare.recent == "odd"
    clock.now_s += PERIOD_S
    assert rare.recent == ""
