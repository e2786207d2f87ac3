"""A pool dies, and its weights take longer to load than anything waits in line: no answer that had begun is lost."""

from __future__ import annotations

from cluster.config.cluster_config import PoolsConfig
from tests.unit.cluster.simulate.towns import run

DIES_S, LOADS_S = 1.0, 200.0


def test_answers_wait_for_a_checkpoint_that_takes_minutes_to_load() -> None:
    outcome, _ = run(f"{DIES_S} kill colocated-0", pools=PoolsConfig(colocated=1), load_s=LOADS_S)
    begun = [one for one in outcome.records if one.arrivals_s and one.arrivals_s[0] < LOADS_S + DIES_S]
    resumed = [one for one in begun if one.error or one.arrivals_s[-1] > LOADS_S + DIES_S]
    assert resumed, "some answers had begun when the only worker died"
    assert not [one.error for one in resumed if one.error]
