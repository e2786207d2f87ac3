"""Routing decisions as tables: who is chosen, and that the costs say why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.config import RouterConfig
from router.policies.base import Alone, Candidate, Decision, Policy, RequestView
from router.policies.limits import avoiding
from router.policies.registry import RANKS, policy_of

PREFILL, DECODE, COLOCATED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.COLOCATED


def policy(name: str) -> Policy:
    return policy_of(RouterConfig(model_path=Path("m"), model_name="m", policy=name))


def view(num_tokens: int = 1000, **kwargs: Any) -> RequestView:
    named: dict[str, Any] = {"request_id": "r", "num_tokens": num_tokens, "block_size": 16} | kwargs
    return RequestView(**named)


def worker(worker_id: str, cached: int = 0, **kwargs: Any) -> Candidate:
    role = {"p": PREFILL, "d": DECODE, "c": COLOCATED}[worker_id[0]]
    kwargs = {"num_free_blocks": 1000, "num_blocks": 1000} | kwargs
    return Candidate(worker_id=worker_id, role=role, num_cached_tokens=cached, **kwargs)


def decide(*candidates: Candidate, name: str = "prefix_aware", num_tokens: int = 1000) -> Decision:
    return policy(name)(view(num_tokens), candidates)


@pytest.mark.parametrize("name", RANKS)
def test_every_policy_serves_every_shape_of_cluster(name: str) -> None:
    both = decide(worker("p0"), worker("d0"), name=name)
    assert (both.prefill, both.decode, both.alone) == ("p0", "d0", None)
    decode_only = decide(worker("d0"), name=name)
    assert (decode_only.prefill, decode_only.decode, decode_only.alone) == (None, "d0", Alone.NO_PREFILL_WORKER)
    colocated = decide(worker("p0"), worker("c0"), name=name)
    assert (colocated.prefill, colocated.decode, colocated.alone) == (None, "c0", Alone.COLOCATED)
    assert both.policy == name


@pytest.mark.parametrize("name", RANKS)
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
    if not decoding:
        return
    decision = policy(name)(view(num_tokens), candidates)
    assert decision == policy(name)(view(num_tokens), candidates)
    assert decision.decode in decoding
    assert decision.prefill is None or decision.prefill[0] == "p"
    assert (decision.prefill is None) == (decision.alone is not None)
    assert all(scored.total == pytest.approx(sum(cost for _, cost in scored.terms)) for scored in decision.scores)


def test_round_robin_takes_turns() -> None:
    candidates = [worker("p0"), worker("p1"), worker("d0"), worker("d1"), worker("d2")]
    turns = [policy("round_robin")(view(num_decided=number), candidates) for number in range(6)]
    assert [turn.prefill for turn in turns] == ["p0", "p1"] * 3
    assert [turn.decode for turn in turns] == ["d0", "d1", "d2"] * 2


def test_least_loaded_counts_requests_then_what_they_have_to_read() -> None:
    assert decide(worker("c0", num_requests=3), worker("c1", num_requests=2), name="least_loaded").decode == "c1"
    waiting = worker("c0", num_requests=2, queued_prefill_tokens=900)
    assert decide(waiting, worker("c1", num_requests=2), name="least_loaded").decode == "c1"


def test_power_of_two_avoids_the_most_loaded_and_spreads_over_the_rest() -> None:
    candidates = [worker(f"c{i}", num_requests=9 if i == 0 else 0) for i in range(4)]
    chosen = Counter(policy("power_of_two")(view(request_id=f"r{i}"), candidates).decode for i in range(300))
    assert set(chosen) == {"c1", "c2", "c3"}
    assert min(chosen.values()) > 50


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
        (1000, 944, Alone.SHORT_REMAINDER),
        (1000, 928, None),
        (60, 0, None),
        (60, 16, None),
        (60, 32, Alone.SHORT_REMAINDER),
    ],
)
def test_a_remainder_is_short_below_both_bounds(num_tokens: int, cached: int, alone: Alone | None) -> None:
    decision = decide(worker("p0"), worker("d0", cached), num_tokens=num_tokens)
    assert decision.alone is alone
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


def test_a_failed_worker_is_avoided_while_there_is_another() -> None:
    avoid = avoiding(policy("prefix_aware"), {"p0", "d0"})
    decision = avoid(view(), [worker("p0", 640), worker("p1"), worker("d0", 640)])
    assert (decision.prefill, decision.decode) == ("p1", "d0")


def test_an_unknown_policy_is_refused_with_a_suggestion() -> None:
    with pytest.raises(Misconfigured, match="prefix_aware"):
        policy("prefix-aware")
    with pytest.raises(Misconfigured, match="round_robin, least_loaded"):
        policy("x")


def test_a_setting_out_of_range_is_named() -> None:
    with pytest.raises(Misconfigured, match=r"local_prefill_share = 1\.5: give a number from 0"):
        RouterConfig(model_path=Path("m"), model_name="m", local_prefill_share=1.5)
