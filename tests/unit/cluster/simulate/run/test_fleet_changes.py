"""Random resizes and flips under load: every token is compared, and nothing may be left behind."""

from __future__ import annotations

from benchmarks.capacity.simulated_changes import run
from protos.errors import NoWorkers
from router.fleet_owner import OrderKind


def test_no_request_notices_that_workers_come_go_and_change_their_roles() -> None:
    outcome, changes = run(seed=2, num_changes=8, period_s=0.6)
    assert {change.kind for change in changes} == {OrderKind.SCALE, OrderKind.FLIP}
    assert not any(failure.code == NoWorkers.code for failure in outcome.failures), "some worker serves at any time"
    assert any(change.state == "reached" for change in changes)
