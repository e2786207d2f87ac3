"""A gateway may have as many connections as the system lets it."""

from __future__ import annotations

import logging
import resource

import pytest

from cluster.process.fd_limit import MOST, raise_limit

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [((1024, 524288), 524288), ((1024, UNLIMITED), MOST), ((UNLIMITED, UNLIMITED), UNLIMITED), ((1024, 2048), 2048)],
)
def test_the_soft_limit_becomes_the_hard_one(
    before: tuple[int, int], after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    with caplog.at_level(logging.WARNING):
        assert raise_limit() == after
    assert limits[-1] == (after, before[1])
    assert bool(caplog.records) == (after == 2048), "few files are said to be few"
