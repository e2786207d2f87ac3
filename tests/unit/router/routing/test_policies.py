"""Routing decisions as tables: who is chosen, and that the costs say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.router_config import RouterConfig
from router.routing.candidate_columns import Candidate, CandidateTable, LaneLatencies, Line, WorkerSet
from router.routing.decision import Decision, RequestView, SingleWorkerReason, avoiding
from router.routing.registry import NAMES, policy_of
from router.routing.request_seconds import LatencyEstimate, estimate, handed_bytes, transfer_s

PREFILL, DECODE, COLOCATED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.COLOCATED


Choose = Callable[[RequestView, Sequence[Candidate]], Decision]


def policy(name: str) -> Choose:
    decide = policy_of(RouterConfig(model_path=Path("m"), model_name="m", policy=name))
    return lambda view, candidates: decide(view, CandidateTable.of(candidates))


def expected_of(view: RequestView, candidates: Sequence[Candidate], decision: Decision) -> LatencyEstimate:
    return estimate(view, *CandidateTable.of(candidates).pair(decision.prefill, decision.decode))


def view(num_tokens: int = 1000, **kwargs: Any) -> RequestView:
    named: dict[str, Any] = {"request_id": "r", "num_tokens": num_tokens, "block_size": 16} | kwargs
    return RequestView(**named)


def worker(worker_id: str, cached: int = 0, **kwargs: Any) -> Candidate:
    role = {"p": PREFILL, "d": DECODE, "c": COLOCATED}[worker_id[0]]
    kwargs = {"num_free_blocks": 1000, "num_blocks": 1000} | kwargs
    return Candidate(worker_id=worker_id, role=role, num_cached_tokens=cached, **kwargs)


def decide(*candidates: Candidate, name: str = "prefix_aware", num_tokens: int = 1000) -> Decision:
    return policy(name)(view(num_tokens), candidates)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_serves_every_shape_of_cluster(name: str) -> None:
    both = decide(worker("p0"), worker("d0"), name=name)
    assert (both.prefill, both.decode, both.single_worker) == ("p0", "d0", None)
    decode_only = decide(worker("d0"), name=name)
    assert (decode_only.prefill, decode_only.decode, decode_only.single_worker) == (
        None,
        "d0",
        SingleWorkerReason.NO_PREFILL_WORKER,
    )
    colocated = decide(worker("p0"), worker("c0"), name=name)
    assert (colocated.prefill, colocated.decode, colocated.single_worker) == (None, "c0", SingleWorkerReason.COLOCATED)
    standing_in = decide(worker("p0"), worker("p1"), name=name)
    assert (standing_in.prefill, standing_in.decode in ("p0", "p1")) == (None, True)
    assert standing_in.single_worker == "stands in for the decode pool"
    assert both.policy == name


@pytest.mark.parametrize("name", NAMES)
@given(
    loads=st.lists(st.tuples(st.sampled_from("pdc"), st.integers(0, 99), st.integers(0, 999)), min_size=1, max_size=6),
    num_tokens=st.integers(1, 999),
)
def test_a_decision_is_always_servable(name: str, loads: list[tuple[str, int, int]], num_tokens: int) -> None:
    candidates = [
        worker(f"{kind}{i}", min(cached, num_tokens - 1), num_requests=requests)
        for i, (kind, requests, cached) in enumerate(loads)
    ]
    decoding = {candidate.worker_id for candidate in candidates if candidate.role is not PREFILL}
    decoding = decoding or {candidate.worker_id for candidate in candidates}
    decision = policy(name)(view(num_tokens), candidates)
    assert decision == policy(name)(view(num_tokens), candidates)
    assert decision.decode in decoding
    assert decision.prefill is None or decision.prefill[0] == "p"
    assert (decision.prefill is None) == (decision.single_worker is not None)
    assert all(scored.total == pytest.approx(sum(cost for _, cost in scored.terms)) for scored in decision.scores)
    *_, chosen = [scored for scored in decision.scores if scored.worker_id == decision.decode]
    assert chosen.terms[-1][0] == f"prefill by {decision.prefill or decision.decode}", "also where there was no choice"


def test_round_robin_takes_turns() -> None:
    candidates = [worker("p0"), worker("p1"), worker("d0"), worker("d1"), worker("d2")]
    turns = [policy("round_robin")(view(num_decided=number), candidates) for number in range(6)]
    assert [turn.prefill for turn in turns] == ["p0", "p1"] * 3
    assert [turn.decode for turn in turns] == ["d0", "d1", "d2"] * 2


def test_least_loaded_counts_requests_then_queued_tokens() -> None:
    assert decide(worker("c0", num_requests=3), worker("c1", num_requests=2), name="least_loaded").decode == "c1"
    waiting = worker("c0", num_requests=2, queued_prefill_tokens=900)
    assert decide(waiting, worker("c1", num_requests=2), name="least_loaded").decode == "c1"


@pytest.mark.parametrize(
    ("why", "candidates", "expected"),
    [
        ("the longest prefix wins", [worker("p0", 320), worker("p1", 640), worker("d0")], ("p1", "d0")),
        ("unless its queue costs more",
         [worker("p0"), worker("p1", 640, queued_prefill_tokens=1300), worker("d0")], ("p0", "d0")),
        ("a slow worker's prefix is worth less",
         [worker("p0", prefill_tokens_per_s=4000.0), worker("p1", 640, prefill_tokens_per_s=1000.0), worker("d0")],
         ("p0", "d0")),
        ("decode's own prefix saves a transfer", [worker("p0"), worker("d0"), worker("d1", 640)], ("p0", "d1")),
        ("decode's load outweighs a saved transfer",
         [worker("p0"), worker("d0"), worker("d1", 640, num_requests=4)], ("p0", "d0")),
        ("a decode worker without room is passed over",
         [worker("p0"), worker("d0", num_free_blocks=10), worker("d1", num_requests=9)], ("p0", "d1")),
        ("a short remainder stays", [worker("p0", 992), worker("d0", 960), worker("d1")], (None, "d0")),
        ("a slow decode worker counts its requests more",
         [worker("p0"), worker("d0", num_requests=3, decode_step_s=0.04),
          worker("d1", num_requests=5, decode_step_s=0.01)], ("p0", "d1")),
    ],
)  # fmt: skip
def test_prefix_aware_weighs(why: str, candidates: list[Candidate], expected: tuple[str | None, str]) -> None:
    decision = decide(*candidates)
    assert (decision.prefill, decision.decode) == expected, why
    assert {scored.worker_id for scored in decision.scores} == {candidate.worker_id for candidate in candidates}


def test_equals_take_turns_so_that_all_caches_are_used() -> None:
    candidates = [worker("p0"), worker("p1"), worker("d0"), worker("d1")]
    turns = [policy("prefix_aware")(view(num_decided=number), candidates) for number in range(4)]
    assert [(turn.prefill, turn.decode) for turn in turns] == [("p0", "d0"), ("p1", "d1")] * 2


@pytest.mark.parametrize(
    ("num_tokens", "cached", "alone"),
    [
        (1000, 944, SingleWorkerReason.SHORT_REMAINDER),
        (1000, 928, None),
        (60, 0, None),
        (60, 16, None),
        (60, 32, SingleWorkerReason.SHORT_REMAINDER),
    ],
)
def test_a_remainder_is_short_below_both_bounds(num_tokens: int, cached: int, alone: SingleWorkerReason | None) -> None:
    decision = decide(worker("p0"), worker("d0", cached), num_tokens=num_tokens)
    assert decision.single_worker is alone
    assert decision.prefill == (None if alone else "p0")


@pytest.mark.parametrize(
    ("requests", "chosen"),
    [((32, 0), "p0"), ((33, 0), "p1"), ((400, 365), "p0"), ((400, 350), "p1")],
    ids=["difference too small", "out of balance", "ratio too small", "ratio large enough"],
)
def test_a_pool_out_of_balance_takes_the_shortest_queue(requests: tuple[int, int], chosen: str) -> None:
    full, other = requests
    decision = decide(worker("p0", 992, num_requests=full), worker("p1", num_requests=other), worker("d0"))
    assert decision.prefill == chosen


FAST, SLOW = Line(fixed_s=0.01, each_s=1e-4), Line(fixed_s=0.01, each_s=1e-3)
STEADY = Line(fixed_s=0.02, each_s=1e-4)


def known(worker_id: str, cached: int = 0, **kwargs: Any) -> Candidate:
    return worker(worker_id, cached, **{"prefill_time": FAST, "step_time": STEADY} | kwargs)


@pytest.mark.parametrize("others", [[], ["d1"]], ids=["the only pair", "one of two"])
def test_a_short_remainder_is_handed_over_from_a_busy_decoder(others: list[str]) -> None:
    busy = [known(name, 960, queued_prefill_tokens=60_000) for name in ("d0", *others)]
    decision = decide(known("p0"), *busy, name="slo")
    assert (decision.prefill, decision.single_worker) == ("p0", None)
    idle = [known(name, 960) for name in ("d0", *others)]
    assert decide(known("p0"), *idle, name="slo").single_worker is SingleWorkerReason.SHORT_REMAINDER


@pytest.mark.parametrize(
    ("why", "candidates", "expected"),
    [
        ("the longest prefix wins", [known("p0", 320), known("p1", 640), known("d0")], ("p1", "d0")),
        ("unless its queue is longer than what it saves",
         [known("p0"), known("p1", 640, queued_prefill_tokens=7000), known("d0")], ("p0", "d0")),
        ("a slow worker's prefix is worth less",
         [known("p0"), known("p1", 640, prefill_time=SLOW), known("d0")], ("p0", "d0")),
        ("a worker that was sent far more than others attracts nothing",
         [known("p0", recent_tokens=10_000.0), known("p1", 640, recent_tokens=90_000.0), known("d0")], ("p0", "d0")),
        ("a full batch is slower", [known("p0"), known("d0", num_requests=40), known("d1", num_requests=9)],
         ("p0", "d1")),
        ("a slow step is slower", [known("p0"), known("d0", step_time=Line(fixed_s=0.1)), known("d1", num_requests=40)],
         ("p0", "d1")),
        ("without blocks one waits for others' ends",
         [known("p0"), known("d0", num_requests=9, num_free_blocks=10), known("d1", num_requests=9)], ("p0", "d1")),
        ("a first token in time is worth more than a prefix",
         [known("p0", 900, queued_prefill_tokens=11_000), known("p1"), known("d0")], ("p1", "d0")),
    ],
)  # fmt: skip
def test_slo_weighs_seconds(why: str, candidates: list[Candidate], expected: tuple[str | None, str]) -> None:
    decision = decide(*candidates, name="slo")
    assert (decision.prefill, decision.decode) == expected, why


def test_slo_chooses_reader_and_writer_by_the_lane_between_them() -> None:
    lanes = {"p0": LaneLatencies({"d0": Line(each_s=1e-6)}), "p1": LaneLatencies({"d0": Line(each_s=1e-9)})}
    seen = view(lanes=lanes, block_bytes=2**16)
    decision = policy("slo")(seen, [known("p0", 160), known("p1"), known("d0", transfer_time=Line(each_s=1e-6))])
    assert (decision.prefill, decision.decode) == ("p1", "d0")
    [whole] = [scored for scored in decision.scores if scored.worker_id == "d0"]
    assert dict(whole.terms)["transfer"] == pytest.approx(1000 / 16 * 2**16 * 1e-9)


@pytest.mark.parametrize(("cached", "num_bytes"), [(0, 1000 * 2**12 + 128 * 2**11), (960, 40 * (2**12 + 2**11))])
def test_a_window_moves_only_its_positions(cached: int, num_bytes: int) -> None:
    seen = view(block_bytes=2**16, window_bytes=[(128, 2**15)])
    assert handed_bytes(seen, known("d0", cached)) == num_bytes


def test_scores_are_those_of_the_decisions_moment() -> None:
    lanes = {"p0": LaneLatencies({"d0": Line(each_s=1e-9)}), "p1": LaneLatencies({"d0": Line(each_s=1.0)})}
    asked_later = policy("slo")(view(lanes=lanes, block_bytes=2**16), [known("p0"), known("d0")])
    lanes["p0"].set("d0", Line(each_s=1e-6))
    [whole] = [scored for scored in asked_later.scores if scored.worker_id == "d0"]
    assert dict(whole.terms)["transfer"] == pytest.approx(1000 / 16 * 2**16 * 1e-9)
    unmeasured = policy("slo")(view(lanes=(none := {}), block_bytes=2**16), [known("p0"), known("d0")])
    none["p0"] = LaneLatencies({"d0": Line(fixed_s=1.0)})
    assert dict(unmeasured.scores[-1].terms)["transfer"] == 0.0


def test_lines_of_lanes_are_the_last_measured_ones() -> None:
    """The lines of a worker's lanes survive every change of a lane."""
    workers = WorkerSet([f"d{number}" for number in range(12)], [WorkerRole.DECODE] * 12)
    ways = LaneLatencies({"d1": Line(each_s=1.0)})

    def each_s() -> dict[str, float]:
        told = ways.lines(workers).each_s.tolist()
        return {name: seconds for name, seconds in zip(workers.worker_ids, told, strict=True) if seconds == seconds}

    assert each_s() == {"d1": 1.0}
    ways.set("d1", Line(each_s=2.0))
    ways.set("d2", Line(each_s=3.0))
    ways.set("elsewhere", Line(each_s=4.0))
    assert each_s() == {"d1": 2.0, "d2": 3.0}
    ways.drop("d1")
    ways.drop("d9")
    assert each_s() == {"d2": 3.0}
    assert dict(ways) == {"d2": Line(each_s=3.0), "elsewhere": Line(each_s=4.0)}
    assert not {"update", "__setitem__", "pop"} & set(dir(ways)), "lines would not follow"


def test_slo_names_every_term_in_seconds() -> None:
    decision = decide(known("p0", 600, queued_prefill_tokens=50), known("d0"), name="slo")
    reading, whole = decision.scores
    terms = dict(reading.terms)
    assert terms.keys() == {"overhead", "queue", "load", "compute", "displaced", "imbalance", "late_ttft"}
    assert terms["overhead"] + terms["queue"] + terms["compute"] == pytest.approx(FAST(50 + 400))
    assert dict(whole.terms).keys() == {"decode", "shortage", "late_tpot", "transfer", "prefill by p0"}


def test_computing_delays_others_only_if_every_queue_is_full() -> None:
    """Else the next prompt goes to the reader without one."""

    def displaced(*queues: int) -> float:
        readers = [known(f"p{n}", num_requests=8, queued_prefill_tokens=num) for n, num in enumerate(queues)]
        return dict(decide(*readers, known("d0"), name="slo").scores[0].terms)["displaced"]

    assert displaced(500, 0) == displaced(0, 500) == displaced(0, 0)
    assert displaced(0, 0) < displaced(500, 100) < displaced(500, 400) < displaced(500, 500)


@pytest.mark.parametrize("name", ["slo", "prefix_aware"])
def test_device_hits_precede_host_hits_and_computing(name: str) -> None:
    near, none, writer = known("p0", 900), known("p2"), known("d0")
    hosted = known("p1", 900, num_host_tokens=800, load_time=Line(each_s=2e-5))
    assert decide(none, hosted, near, writer, name=name).prefill == "p0"
    assert decide(none, hosted, writer, name=name).prefill == "p1"


def test_a_load_never_takes_longer_than_computing() -> None:
    loading = Line(each_s=5e-5)
    quick = known("c0", 900, num_host_tokens=800, load_time=loading)
    slow = known("c1", 900, num_host_tokens=800, load_time=Line(each_s=1.0))
    expected = expected_of(view(), [quick], decide(quick, name="slo"))
    assert expected.ttft_s == pytest.approx(FAST(100) + loading(800))
    assert (expected.num_cached_tokens, expected.num_host_tokens) == (900, 800)
    assert expected_of(view(), [slow], decide(slow, name="slo")).ttft_s == pytest.approx(FAST(900))


def test_a_decoder_receives_blocks_only_on_its_host() -> None:
    """Blocks of the host are no room, and nothing that a reader could leave out."""
    seen = view(1000, block_bytes=1600)
    candidates = [known("p0"), known("d0", 160, num_host_tokens=160, transfer_time=Line(each_s=1e-6))]
    assert expected_of(seen, candidates, policy("slo")(seen, candidates)).transfer_s == pytest.approx(0.1)


def test_an_estimate_knows_the_lane_between_the_two() -> None:
    lanes = {"p0": LaneLatencies({"d0": Line(fixed_s=0.5, each_s=2e-6)})}
    candidates = [known("p0"), known("d0"), known("d1")]
    seen = view(1000, block_bytes=1600, lanes=lanes)
    [between] = transfer_s(seen, ["p0"], CandidateTable.of(candidates).decode_pool).tolist()
    for writer, expected_s in zip(("d0", "d1"), between, strict=True):
        decision = Decision(policy="slo", prefill="p0", decode=writer)
        assert expected_of(seen, candidates, decision).transfer_s == expected_s
    assert between[0] > 0.5 > between[1]


def test_indistinguishable_costs_take_turns() -> None:
    near = [known("c0"), known("c1", prefill_time=Line(fixed_s=0.0101, each_s=1e-4))]
    assert {policy("slo")(view(num_decided=number), near).decode for number in range(2)} == {"c0", "c1"}


def test_equal_long_answers_do_not_hide_the_fastest_prefill() -> None:
    slow = Line(fixed_s=0.15)
    near = [known("c0", step_time=slow, queued_prefill_tokens=4000), known("c1", step_time=slow)]
    assert {policy("slo")(view(num_decided=number), near).decode for number in range(2)} == {"c1"}


def test_readers_that_seem_alike_take_turns_whatever_their_lanes() -> None:
    lanes = {"p0": LaneLatencies({"d0": Line(each_s=1e-9)}), "p1": LaneLatencies({"d0": Line(each_s=1.01e-9)})}
    seen: dict[str, Any] = {"lanes": lanes, "block_bytes": 2**16}
    near = [known("p0"), known("p1", prefill_time=Line(fixed_s=0.0101, each_s=1e-4)), known("d0")]
    assert {policy("slo")(view(num_decided=number, **seen), near).prefill for number in range(2)} == {"p0", "p1"}


def test_an_estimate_equals_the_costs() -> None:
    candidates = [
        known("p0", 600, queued_prefill_tokens=50),
        known("d0", num_requests=3, transfer_time=Line(each_s=1e-6)),
    ]
    seen = view(block_bytes=1600)
    expected = expected_of(seen, candidates, policy("round_robin")(seen, candidates))
    assert expected.ttft_s == pytest.approx(FAST(450))
    assert expected.tpot_s == pytest.approx(STEADY(4))
    assert expected.transfer_s == pytest.approx(0.1)
    assert expected.num_cached_tokens == 600


def test_a_failed_worker_is_avoided_while_there_is_another() -> None:
    avoid = avoiding(policy_of(RouterConfig(model_path=Path("m"), model_name="m"), "prefix_aware"), {"p0", "d0"})
    decision = avoid(view(), CandidateTable.of([worker("p0", 640), worker("p1"), worker("d0", 640)]))
    assert (decision.prefill, decision.decode) == ("p1", "d0")


def test_an_unknown_policy_is_refused_with_a_suggestion() -> None:
    with pytest.raises(Misconfigured, match="prefix_aware"):
        policy("prefix-aware")
    with pytest.raises(Misconfigured, match="round_robin, least_loaded"):
        policy("x")


def test_a_setting_out_of_range_is_named() -> None:
    with pytest.raises(Misconfigured, match=r"local_prefill_tokens = -1: give a number from 0"):
        RouterConfig(model_path=Path("m"), model_name="m", local_prefill_tokens=-1)


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_policy_can_be_made(name: str) -> None:
    made = policy_of(RouterConfig(model_path=Path("m"), model_name="m"), name)
    assert made(view(), CandidateTable.of([worker("c0")])).policy == name
