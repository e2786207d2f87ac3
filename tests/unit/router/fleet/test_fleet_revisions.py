"""Which revision a request gets: in proportion to the workers of each, and none whose workers retire."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from protos.errors import IncompatibleWorkers
from protos.release import WIRE
from protos.values import KVLayout, LaneAddress, WorkerInfo, WorkerRole
from router.fleet.fleet_revisions import FleetRevisions, RevisedWorker, check_joins, shares
from router.routing.candidate_columns import WorkerSet

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
NUMBERS = itertools.count()


def info(role: WorkerRole, revision: str, *, heads: int = 1, vocab_size: int = 32) -> WorkerInfo:
    worker_id = f"{role}-{next(NUMBERS)}"
    return WorkerInfo(
        worker_id=worker_id, incarnation=1, role=role, model="m", address="h:1", max_model_len=32, revision=revision,
        layout=KVLayout.dense(num_layers=1, num_kv_heads=heads, head_dim=8, block_size=16, dtype="float32", model="m"),
        lane=LaneAddress(worker_id=worker_id, incarnation=1, host="h", port=1), vocab_size=vocab_size,
    )  # fmt: skip


def worker(role: WorkerRole, revision: str, *, takes_work: bool = True, retiring: bool = False) -> RevisedWorker:
    return RevisedWorker(info(role, revision), takes_work, retiring)


def test_new_requests_are_spread_by_decode_workers() -> None:
    revisions = FleetRevisions()
    revisions.update([worker(DECODE, "old"), worker(DECODE, "old"), worker(DECODE, "old"), worker(DECODE, "new")])
    first = [revisions.begin() for _ in range(4)]
    assert Counter(first) == {"old": 3, "new": 1}
    assert [revisions.begin() for _ in range(4)] == first
    assert revisions.count == 2


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker(DECODE, "old", retiring=True), worker(DECODE, "new")], {"new": 1.0}),
        ([worker(DECODE, "old", retiring=True)], {"old": 1.0}),
        ([worker(PREFILL, "old"), worker(DECODE, "old"), worker(DECODE, "new")], {"old": 1.0}),
        ([worker(PREFILL, "new"), worker(DECODE, "old")], {"old": 1.0}),
        ([worker(DECODE, "old"), worker(DECODE, "new", takes_work=False)], {"old": 1.0}),
        ([], {}),
    ],
)
def test_a_revision_that_cannot_serve_or_retires_gets_none(
    workers: list[RevisedWorker], expected: dict[str, float]
) -> None:
    assert shares(workers) == expected


async def test_a_successor_needs_equal_tokens() -> None:
    revisions, texts = FleetRevisions(), {"": "a", "settings": "a", "model": "b"}

    async def opened(one: WorkerInfo) -> str:
        return texts[one.revision]

    revisions.open_texts = opened
    first, settings, model = (worker(DECODE, revision) for revision in texts)
    for one in (first, settings, model):
        await revisions.learn(one.info)
    revisions.update([first, settings])
    assert not revisions.is_gone("")
    revisions.update([settings])
    assert (revisions.is_gone(""), revisions.begin(), revisions.successor("")) == (True, "settings", "settings")
    revisions.update([model])
    assert (revisions.begin(), revisions.successor("")) == ("model", None)
    revisions.update([])
    assert not revisions.is_gone(""), "without workers one waits for them"


def test_the_workers_of_a_revision_are_found_in_a_table() -> None:
    revisions, first, other = FleetRevisions(), worker(DECODE, "old"), worker(DECODE, "new")
    revisions.update([first, other])
    table = WorkerSet([first.info.worker_id, other.info.worker_id], [DECODE, DECODE])
    assert (revisions.places("new", table), revisions.serves_all("new")) == ([1], False)
    revisions.update([other])
    assert revisions.serves_all("new")


def test_only_workers_of_one_revision_must_agree() -> None:
    old, new = info(DECODE, "old"), info(DECODE, "new", heads=4, vocab_size=64)
    check_joins(new, [old])
    for other, message in (
        (info(PREFILL, "old", vocab_size=64), "vocab_size 64, but .* has 32"),
        (info(PREFILL, "old", heads=4), "num_kv_heads"),
    ):
        with pytest.raises(IncompatibleWorkers, match=message):
            check_joins(other, [new, old])


def test_a_worker_of_another_wire_is_refused() -> None:
    for wire in (0, WIRE + 1):  # 0: of a version that did not say
        with pytest.raises(IncompatibleWorkers, match=r"worker .* 7\.8\.9") as refused:
            check_joins(replace(info(DECODE, "new"), wire=wire, version="7.8.9"), [])
        assert refused.value.param == "wire"
