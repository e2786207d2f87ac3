"""Who gets what: shares of CPUs, whole GPUs, threads, and what is missing when it does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.cluster_config import PoolsConfig
from cluster.supervision.worker_placement import (
    NodeResources,
    check_cores,
    check_fits,
    missing,
    plan,
    replan,
    shared_cpus,
    why_not_gpus,
)
from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.fleet_owner import Revision

LAPTOP = (NodeResources(cpus=2.0),)


def test_a_laptop_holds_one_of_each_pool() -> None:
    prefill, decode = plan(PoolsConfig(), LAPTOP, tp=1, device="auto")
    assert [prefill.worker_id, decode.worker_id] == ["prefill-0", "decode-0"]
    assert [prefill.role, decode.role] == [WorkerRole.PREFILL, WorkerRole.DECODE]
    assert prefill.bundles() == decode.bundles() == [{"CPU": 1.0}]
    assert prefill.device == "cpu"
    assert prefill.num_threads == 1


def test_a_laptop_holds_tensor_parallel_workers() -> None:
    workers = plan(PoolsConfig(), LAPTOP, tp=2, device="cpu")
    assert [worker.bundles() for worker in workers] == [[{"CPU": 0.5}, {"CPU": 0.5}]] * 2
    assert all(worker.num_threads == 1 for worker in workers)


def test_threads_share_the_cores_of_a_machine() -> None:
    [worker, _] = plan(PoolsConfig(colocated=2), (NodeResources(cpus=16.0),), tp=1, device="cpu")
    assert worker.num_threads == 8
    [alone] = plan(PoolsConfig(colocated=1), (NodeResources(cpus=4.0), NodeResources(cpus=4.0)), tp=1, device="cpu")
    assert alone.num_threads == 4


@pytest.mark.parametrize(
    ("pools", "tp", "cpus", "words"),
    [
        (PoolsConfig(decode=8), 1, 2.0, ["9 workers share 2 CPUs", "at most 2 workers, as --prefill 1 --decode 1"]),
        (PoolsConfig(colocated=5), 1, 4.0, ["5 workers share 4 CPUs", "at most --workers 4"]),
        (PoolsConfig(), 1, 1.0, ["2 workers share 1 CPU:", "at most --workers 1"]),
        (PoolsConfig(), 4, 4.0, ["2 workers of together 8 ranks share 4 CPUs", "fewer workers, or a smaller --tp"]),
    ],
)
def test_workers_that_share_cpus_get_a_warning_with_a_fix(
    pools: PoolsConfig, tp: int, cpus: float, words: list[str]
) -> None:
    nodes = (NodeResources(cpus=cpus),)
    said = shared_cpus(plan(pools, nodes, tp=tp, device="auto"), nodes)
    assert all(word in said for word in words), said


def test_workers_with_a_cpu_each_or_on_gpus_share_none() -> None:
    assert shared_cpus(plan(PoolsConfig(), LAPTOP, tp=1, device="auto"), LAPTOP) == ""
    gpus = (NodeResources(cpus=2.0, gpus=8.0),)
    assert shared_cpus(plan(PoolsConfig(decode=7), gpus, tp=1, device="auto"), gpus) == ""


def test_a_rank_has_a_gpu_to_itself() -> None:
    workers = plan(PoolsConfig(prefill=1, decode=1), (NodeResources(cpus=32.0, gpus=4.0),), tp=2, device="auto")
    assert all(worker.device == "cuda" for worker in workers)
    assert workers[0].bundles() == [{"CPU": 1.0, "GPU": 1.0}] * 2


def test_auto_takes_cpus_when_gpus_are_too_few() -> None:
    nodes = (NodeResources(cpus=8.0, gpus=1.0),)
    assert {worker.device for worker in plan(PoolsConfig(), nodes, tp=1, device="auto")} == {"cpu"}
    assert why_not_gpus(PoolsConfig(), nodes, tp=1) == "1 prefill, 1 decode with tp 1 need 2 GPUs, and there are 1"


def test_ranks_of_a_worker_share_a_machine() -> None:
    apart = (NodeResources(cpus=8.0, gpus=1.0), NodeResources(cpus=8.0, gpus=1.0))
    assert {worker.device for worker in plan(PoolsConfig(colocated=1), apart, tp=2, device="auto")} == {"cpu"}
    assert "but on one machine each for 0 of them only" in why_not_gpus(PoolsConfig(colocated=1), apart, tp=2)


def test_a_workers_ranks_may_span_machines_if_set() -> None:
    apart = (NodeResources(cpus=8.0, gpus=1.0), NodeResources(cpus=8.0, gpus=1.0))
    [worker] = plan(PoolsConfig(colocated=1), apart, tp=2, device="auto", span_nodes=True)
    assert (worker.device, worker.spans_nodes) == ("cuda", True)
    [first, other] = replan([worker], PoolsConfig(colocated=2), apart, tp=2, span_nodes=True)
    assert (first.spans_nodes, other.spans_nodes) == (True, True)
    assert plan(PoolsConfig(colocated=1), apart, tp=4, device="auto", span_nodes=True)[0].device == "cpu"


def test_pools_may_have_workers_of_different_sizes() -> None:
    pools = PoolsConfig(prefill=2, decode=1, prefill_tp=1, decode_tp=2)
    workers = plan(pools, (NodeResources(cpus=4.0, gpus=2.0), NodeResources(cpus=4.0, gpus=2.0)), tp=4, device="auto")
    assert [(worker.worker_id, worker.num_ranks) for worker in workers] == [
        ("prefill-0", 1), ("prefill-1", 1), ("decode-0", 2),
    ]  # fmt: skip
    assert all(worker.device == "cuda" for worker in workers)
    scattered = (NodeResources(cpus=4.0, gpus=3.0), NodeResources(cpus=4.0, gpus=1.0))
    assert why_not_gpus(pools, scattered, tp=4) == ""
    alone = tuple(NodeResources(cpus=1.0, gpus=1.0) for _ in range(4))
    missing = "2 prefill with tp 1, 1 decode with tp 2 need 4 GPUs, and there are 4, but on one machine each for 0 of"
    assert why_not_gpus(pools, alone, tp=4).startswith(missing)


def test_a_pool_of_no_ranks_is_refused() -> None:
    with pytest.raises(Misconfigured, match="prefill_tp = 0"):
        PoolsConfig(prefill_tp=0)


def test_gpus_that_were_asked_for_and_are_not_there_are_refused() -> None:
    check_fits(PoolsConfig(), (NodeResources(cpus=8.0, gpus=2.0),), tp=1, device="cuda")
    check_fits(PoolsConfig(), LAPTOP, tp=1, device="auto")
    with pytest.raises(
        Misconfigured, match=r"need 2 GPUs, and there are 0: use --colocated \(1 worker, 1 GPU\) or --device cpu"
    ):
        check_fits(PoolsConfig(), LAPTOP, tp=1, device="cuda")


def test_pools_can_be_told_apart_by_a_resource_of_their_name() -> None:
    prefill, decode = plan(PoolsConfig(), LAPTOP, tp=1, device="cpu", pool_resources=True)
    assert prefill.bundles() == [{"CPU": 1.0, "prefill": 1.0}]
    assert decode.bundles() == [{"CPU": 1.0, "decode": 1.0}]


@given(cpus=st.integers(1, 256), count=st.integers(1, 64), tp=st.sampled_from([1, 2, 4, 8]))
def test_shares_never_exceed_the_machine(cpus: int, count: int, tp: int) -> None:
    workers = plan(PoolsConfig(colocated=count), (NodeResources(cpus=float(cpus)),), tp=tp, device="cpu")
    taken = sum(bundle["CPU"] for worker in workers for bundle in worker.bundles())
    assert taken <= cpus + 1e-6
    assert all(worker.num_threads >= 1 for worker in workers)
    assert len({worker.worker_id for worker in workers}) == count


def test_a_new_worker_shares_the_rest_and_others_keep_theirs() -> None:
    before = plan(PoolsConfig(), LAPTOP, tp=1, device="auto")
    more = replan(before, PoolsConfig(decode=2), LAPTOP, tp=1)
    assert more[:2] == before
    assert (more[2].worker_id, more[2].device, more[2].cpus_per_rank) == ("decode-1", "cpu", 0.0)
    assert more[2].bundles() == [{"memory": 1.0}], "Ray refuses an empty bundle"
    on_pods = replan(before, PoolsConfig(decode=2), LAPTOP, tp=1, pool_resources=True)
    assert on_pods[2].bundles() == [{"decode": 1.0}], "what Ray's autoscaler has to find a node type for"
    freed = replan(more[::2], PoolsConfig(decode=3), (NodeResources(cpus=4.0),), tp=1)
    assert [placed.cpus_per_rank for placed in freed] == [1.0, 1.0, 0.0, 1.0]
    assert replan(more, PoolsConfig(), LAPTOP, tp=1) == before


def test_a_flipped_worker_keeps_its_name_and_its_place() -> None:
    before = plan(PoolsConfig(decode=2), (NodeResources(cpus=4.0),), tp=1, device="cpu", pool_resources=True)
    flips = {"decode-1": WorkerRole.PREFILL}
    after = replan(before, PoolsConfig(prefill=2), LAPTOP, tp=1, pool_resources=True, flips=flips)
    assert {worker.worker_id: worker.role for worker in after} == {
        "prefill-0": "prefill", "decode-1": "prefill", "decode-0": "decode",
    }  # fmt: skip
    [flipped] = [worker for worker in after if worker.worker_id == "decode-1"]
    assert flipped.pool_resource == "decode", "its place is on a machine for decode workers"
    grown = replan(after, PoolsConfig(prefill=2, decode=3), LAPTOP, tp=1)
    assert sorted(worker.worker_id for worker in grown) == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0"]
    shrunk = replan(after, PoolsConfig(prefill=1), LAPTOP, tp=1)
    assert [worker.worker_id for worker in shrunk] == ["prefill-0", "decode-0"], (
        "the one from the other pool goes first"
    )


def test_a_flip_between_different_tensor_parallelism_is_refused() -> None:
    pools = PoolsConfig(decode=2, decode_tp=2)
    before = plan(pools, LAPTOP, tp=1, device="cpu")
    with pytest.raises(Misconfigured, match=r"decode-1 has 2 ranks, and a prefill worker has 1: .*scale both"):
        replan(before, PoolsConfig(prefill=2, decode_tp=2), LAPTOP, tp=1, flips={"decode-1": WorkerRole.PREFILL})


def test_more_ranks_than_cores_can_carry_are_refused() -> None:
    check_cores(PoolsConfig(prefill=1, decode=7), LAPTOP, tp=1)
    with pytest.raises(Misconfigured, match="9 ranks on 2 CPUs: give at most 8"):
        check_cores(PoolsConfig(prefill=1, decode=8), LAPTOP, tp=1)


def test_missing_workers_are_named_one_by_one() -> None:
    desired = {"decode-0": WorkerRole.DECODE, "decode-1": WorkerRole.PREFILL, "decode-2": WorkerRole.DECODE}
    serving = {"decode-0": WorkerRole.DECODE, "decode-1": WorkerRole.DECODE, "decode-9": WorkerRole.DECODE}
    assert missing(desired, serving) == [
        "decode-2 to serve", "decode-1 to change from decode to prefill", "decode-9 to end",
    ]  # fmt: skip
    assert missing(desired, desired) == []


def test_workers_of_two_revisions_share_the_machine() -> None:
    before, new = plan(PoolsConfig(decode=2), LAPTOP, tp=1, device="cpu"), Revision(name="new", model="/models/new")
    counts = {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 2}
    both = replan(before, PoolsConfig(decode=1), LAPTOP, tp=1, revision=new, others=counts)
    assert {worker.worker_id: worker.revision.name for worker in both} == {
        "prefill-0": "", "prefill-1": "new", "decode-0": "", "decode-1": "", "decode-2": "new",
    }  # fmt: skip
    fewer = replan(both, PoolsConfig(decode=1), LAPTOP, tp=1, revision=new, others={**counts, WorkerRole.DECODE: 1})
    assert [worker.worker_id for worker in fewer] == ["prefill-0", "prefill-1", "decode-0", "decode-2"]
    after = replan(fewer, PoolsConfig(decode=2), LAPTOP, tp=1, revision=new)
    assert {placed.revision.name for placed in after} == {"new"}
    assert [worker.worker_id for worker in after] == ["prefill-1", "decode-1", "decode-2"]
