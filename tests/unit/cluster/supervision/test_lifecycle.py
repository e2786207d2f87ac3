"""When a worker is started again, under a clock of our own."""

from __future__ import annotations

from cluster.config.cluster_config import SupervisionConfig
from cluster.supervision.lifecycle import LifeState, delay_s, failed, initial, opened, restarted
from protos.errors import BadCheckpoint, Misconfigured, WorkerLost

CONFIG = SupervisionConfig(initial_backoff_s=1.0, backoff_factor=2.0, max_backoff_s=10.0, backoff_reset_s=60.0)
DIED = WorkerLost("it died")


def test_delays_grow_to_their_limit() -> None:
    assert [delay_s(number, CONFIG) for number in (1, 2, 3, 4, 5, 6, 10_000)] == [1, 2, 4, 8, 10, 10, 10]
    assert delay_s(5, SupervisionConfig(initial_backoff_s=0.0)) == 0.0


def test_a_worker_that_dies_young_waits_longer_each_time() -> None:
    life = opened(initial(0.0), 5.0)
    for death_s, delay in ((6.0, 1.0), (8.0, 2.0), (11.0, 4.0)):
        life = failed(life, DIED, death_s, CONFIG)
        assert life.state is LifeState.WAITING
        assert life.due_s == death_s + delay
        assert life.reason == "it died"
        life = opened(restarted(life, life.due_s), life.due_s)


def test_long_service_makes_up_for_old_deaths() -> None:
    life = opened(restarted(failed(initial(0.0), DIED, 1.0, CONFIG), 2.0), 3.0)
    assert failed(life, DIED, 3.0 + 59.0, CONFIG).num_failures == 2
    assert failed(life, DIED, 3.0 + 60.0, CONFIG).num_failures == 1


def test_a_long_start_is_no_service() -> None:
    life = restarted(failed(initial(0.0), DIED, 1.0, CONFIG), 2.0)
    assert failed(life, DIED, 500.0, CONFIG).num_failures == 2


def test_settings_that_never_worked_fail_permanently() -> None:
    life = failed(initial(0.0), BadCheckpoint("no weights"), 1.0, CONFIG)
    assert life.state is LifeState.FAILED_PERMANENTLY
    assert life.reason == "no weights"


def test_settings_that_worked_once_are_tried_again() -> None:
    life = failed(opened(initial(0.0), 1.0), DIED, 2.0, CONFIG)
    again = failed(restarted(life, 3.0), Misconfigured("no memory left now"), 4.0, CONFIG)
    assert again.state is LifeState.WAITING
