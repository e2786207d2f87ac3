"""Which lanes are given up: the idle ones, the least recently used ones beyond the bound, and never one in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.lane_rules import LaneConfig, merged, require_health, require_room, superfluous, why_unhealthy
from protos.errors import Misconfigured, Overloaded, TransferFailed
from protos.values import LaneLoad, LaneStats

CONFIG = LaneConfig(max_lanes=3, idle_timeout_s=60.0)


def lanes(idle: Mapping[str, float]) -> list[LaneStats]:
    return [
        LaneStats(peer=peer, transport="gloo", state="open", num_bytes=0, busy_s=0.0, idle_s=idle_s)
        for peer, idle_s in idle.items()
    ]


def test_a_lane_that_idles_too_long_goes() -> None:
    assert superfluous(lanes({"a": 61.0, "b": 59.0}), (), CONFIG) == ("a",)


def test_a_lane_that_never_came_about_goes_when_nobody_needs_it() -> None:
    awaited = [replace(lane, state="opening") for lane in lanes({"dead": 1.0, "late": 1.0, "new": 0.1})]
    assert superfluous(awaited, {"late"}, CONFIG) == ("dead",)


def test_beyond_the_bound_the_least_recently_used_goes() -> None:
    assert superfluous(lanes({"a": 1.0, "b": 4.0, "c": 2.0, "d": 3.0}), (), CONFIG) == ("b",)


def test_a_lane_in_use_stays_however_long_it_waits() -> None:
    assert superfluous(lanes({"a": 1000.0, "b": 4.0, "c": 2.0, "d": 3.0}), {"a"}, CONFIG) == ("b",)
    assert not superfluous(lanes(dict.fromkeys("abcd", 1000.0)), set("abcd"), CONFIG)


@given(
    idle=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 120)),
    needed=st.sets(st.sampled_from("abcdefgh")),
    bound=st.integers(1, 8),
)
def test_the_best_used_lanes_are_kept_within_bounds(idle: Mapping[str, float], needed: set[str], bound: int) -> None:
    gone = set(superfluous(lanes(idle), needed, LaneConfig(max_lanes=bound, idle_timeout_s=60.0)))
    left = idle.keys() - gone
    assert not gone & needed
    assert len(left) <= max(bound, len(needed & idle.keys()))
    assert all(idle[peer] <= 60.0 for peer in left - needed)
    for peer in gone:
        assert all(idle[other] <= idle[peer] for other in left - needed), "one used less recently was kept instead"


def test_a_ticket_is_refused_that_would_need_one_lane_too_many() -> None:
    require_room("d", {"a", "b"}, CONFIG)
    require_room("a", {"a", "b", "c"}, CONFIG)
    with pytest.raises(Overloaded, match="3 lanes are in use, of at most 3"):
        require_room("d", {"a", "b", "c"}, CONFIG)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stall_s", 0.0), ("transport", "pigeon")],
)
def test_settings_that_cannot_be_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(Misconfigured, match=name):
        LaneConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["quarantined", "stuck"])
def test_a_peer_with_a_hung_lane_gets_no_ticket(state: str) -> None:
    sick, well = lanes({"a": 1.0, "b": 1.0})
    states = [replace(sick, state=state, reason="nothing moved"), well]
    require_health("b", states)
    require_health("unknown", states)
    with pytest.raises(TransferFailed, match=f"between here and a is {state}: nothing moved") as raised:
        require_health("a", states)
    assert raised.value.retry_after_s


def test_a_worker_is_unhealthy_by_its_own_threads_only() -> None:
    (lane,) = lanes({"a": 1.0})
    assert not why_unhealthy([lane, replace(lane, state="quarantined")])
    assert why_unhealthy([lane, replace(lane, state="stuck")]) == "the lane to a is stuck and does not end"


def test_loads_of_both_ends_are_one_account() -> None:
    gloo = LaneLoad(transport="gloo", reason="another host", num_open=1, num_opened=3, num_lost=2, num_stuck=1)
    shm = LaneLoad(transport="shm", num_open=2, num_opened=2)
    both = merged([gloo, shm, replace(gloo, num_corrupt=1)])
    assert both == (
        LaneLoad(
            transport="gloo", reason="another host", num_open=2, num_opened=6, num_lost=4, num_stuck=2, num_corrupt=1
        ),
        shm,
    )
