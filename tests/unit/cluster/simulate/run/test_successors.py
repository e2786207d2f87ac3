"""A pool dies, and its weights take longer to load than anything waits in line: no answer that had begun is lost."""

from __future__ import annotations

from cluster.config.cluster_config import PoolsConfig
from tests.unit.cluster.simulate.towns import run

DIES_S, LOADS_S = 1.0, 200.0


def test_answers_wait_for_a_checkpoint_that_takes_minutes_to_load() -> None:
    outcome, _ = run(f"{DIES_S} kill colocated-0", pools=PoolsConfig(colocated=1), load_s=LOADS_S)
    begun = [record for record in outcome.records if record.arrivals_s and record.arrivals_s[0] < LOADS_S + DIES_S]
    resumed = [finding for finding in begun if finding.error or finding.arrivals_s[-1] > LOADS_S + DIES_S]
    assert resumed, "some answers had begun when the only worker died"
    assert not [finding.error for finding in resumed if finding.error]
