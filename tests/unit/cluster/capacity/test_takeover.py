"""How the next controller continues with the workers of one that has ended: what it orders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.capacity.controller import FleetRecord
from cluster.capacity.takeover import takeover_of
from cluster.config.cluster_config import ClusterConfig
from cluster.config.revised import digest_of, next_revision
from cluster.config.settings import make_config
from cluster.supervision.living import LivingFleet, LivingWorker
from cluster.supervision.worker_placement import NodeResources, WorkerPlan, plan
from protos.values import WorkerRole
from router.fleet_owner import ChangeState, DesiredFleet, FleetChange, OrderKind, Revision
from tests.unit.cluster.capacity.staged_fleet import StagedFleet

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
TOKEN = "t" * 32
FIRST = Revision()


def config(**settings: Any) -> ClusterConfig:
    return make_config({"model": "m", "worker": {"num_blocks": 64}} | settings)


def left_by(before: ClusterConfig, *plans: WorkerPlan) -> LivingFleet:
    made = plans or plan(before.pools, (NodeResources(cpus=2.0),), tp=1, device="cpu")
    living = tuple(
        LivingWorker(
            worker_id=worker.worker_id, incarnation=1, hosts=("",), devices=(), names=(worker.worker_id,), pids=(7,)
        )
        for worker in made
    )
    return LivingFleet(
        folder="baton-test", ray_address="", peers=replace(before.peers, token=TOKEN), worker=before.worker,
        plans=tuple(made), leaving=(), living=living, have_served=(),
    )  # fmt: skip


def record_of(before: ClusterConfig, *changes: FleetChange, desired: DesiredFleet | None = None) -> FleetRecord:
    configured = DesiredFleet(counts=dict(before.pools.counts()))
    return FleetRecord(
        configured=configured, desired=desired or configured, changes=changes, origin=digest_of(before)
    )  # fmt: skip


def test_the_same_settings_keep_even_ordered_numbers() -> None:
    bigger = DesiredFleet(counts={PREFILL: 1, DECODE: 2})
    plans = plan(config().pools.with_counts(bigger.counts), (NodeResources(cpus=2.0),), tp=1, device="cpu")
    takeover = takeover_of(left_by(config(), *plans), record_of(config(), desired=bigger), config())
    assert takeover is not None
    assert (takeover.orders, takeover.record.desired) == ([], bigger)
    assert takeover.config.peers.token == TOKEN, "the workers know no other"


def test_other_worker_settings_roll_and_other_numbers_scale() -> None:
    after = config(worker={"max_num_seqs": 8}, pools={"decode": 3}, lanes={"stall_s": 3})
    takeover = takeover_of(left_by(config()), record_of(config()), after)
    assert takeover is not None
    scale, roll = takeover.orders
    assert (scale.kind, scale.counts) == (OrderKind.SCALE, {PREFILL: 1, DECODE: 3})
    changed = {"worker.max_num_seqs": 8, "worker.num_blocks": None, "lanes.stall_s": 3.0}
    assert (roll.kind, roll.model, roll.settings) == (OrderKind.ROLL, "", changed)
    revision = next_revision(takeover.config, FIRST, model="", settings=roll.settings, fingerprint="")
    assert revision.name
    assert takeover.record.origin == digest_of(config()), "the roll is ordered again if it never began"


def test_a_change_that_no_worker_sees_rolls_nothing() -> None:
    takeover = takeover_of(left_by(config()), record_of(config()), config(served_name="other"))
    assert takeover is not None
    assert takeover.orders == []
    assert takeover.record.origin == digest_of(config(served_name="other"))


def test_an_interrupted_roll_goes_back_with_both_revisions() -> None:
    newer = next_revision(config(), FIRST, model="", settings={"worker.max_num_seqs": 8}, fingerprint="")
    before = DesiredFleet(counts={PREFILL: 1, DECODE: 1})
    change = FleetChange(
        number=3, kind=OrderKind.ROLL, who="ann", why="", before=before, after=replace(before, revision=newer), at_s=0.0
    )
    prefill, decode = plan(config().pools, (NodeResources(cpus=2.0),), tp=1, device="cpu")
    added = replace(decode, worker_id="decode-1", revision=newer)
    left = left_by(config(), prefill, decode, added)
    takeover = takeover_of(left, record_of(config(), change, desired=change.after), config())
    assert takeover is not None
    assert ([order.kind for order in takeover.orders], takeover.record.desired) == ([OrderKind.ABORT], before)
    assert takeover.record.changes[0].state is ChangeState.FAILED
    roll = takeover.cut_off(StagedFleet())
    assert roll is not None
    assert (roll.to, roll.former) == (FIRST, newer)
    assert (roll.mix.newer, roll.mix.older) == ({PREFILL: 1, DECODE: 1}, {PREFILL: 0, DECODE: 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"worker": {"device": "cuda"}},
        {"peers": {"token": "u" * 32}},
        {"ray": {"address": "auto"}},
        {"pools": {"colocated": 1}},
    ],
)
def test_workers_that_could_be_neither_called_nor_rolled_end(settings: dict[str, Any]) -> None:
    assert takeover_of(left_by(config()), record_of(config()), config(**settings)) is None
