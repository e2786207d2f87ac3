"""Lanes are looked after now and then, and tickets kept from lanes that cannot serve them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.lane_rules import LaneConfig
from protos.errors import Overloaded, TransferFailed
from protos.values import LaneStats
from workers.transfer.transfer_leader import PERIOD_S, LaneUpkeep

LANE = LaneStats(peer="a", transport="shm", state="open", num_bytes=0, busy_s=0.0, idle_s=10.0)


class Lanes:
    def __init__(self, *lanes: LaneStats, **settings: float) -> None:
        self.lanes = list(lanes)
        self.parted: list[str] = []
        self.upkeep = LaneUpkeep(lambda: self.lanes, self.close_lane, LaneConfig(**settings))  # type: ignore[arg-type]

    def close_lane(self, peer: str) -> None:
        self.parted.append(peer)
        self.lanes = [lane for lane in self.lanes if lane.peer != peer]


def test_an_idle_lane_is_given_up_and_one_with_a_ticket_is_not() -> None:
    lanes = Lanes(LANE, replace(LANE, peer="b"), replace(LANE, peer="c", idle_s=1.0), idle_timeout_s=5.0)
    assert lanes.upkeep.overdue()
    lanes.upkeep.close_unneeded(100.0, lambda: {"b"})
    assert lanes.parted == ["a"]
    assert lanes.upkeep.overdue(), "b will do when its ticket has ended"


def test_an_opening_lane_is_maintained() -> None:
    """Nothing else would wake a worker whose last ticket has ended."""
    lanes = Lanes(replace(LANE, state="opening", idle_s=0.0))
    assert lanes.upkeep.overdue()
    lanes.upkeep.close_unneeded(100.0, set)
    assert not lanes.parted
    lanes.lanes = [replace(LANE, state="opening", idle_s=0.6)]
    lanes.upkeep.close_unneeded(100.0 + PERIOD_S, set)
    assert lanes.parted == ["a"]
    assert not lanes.upkeep.overdue()


def test_it_looks_once_in_a_while_only() -> None:
    lanes = Lanes(LANE, idle_timeout_s=5.0)
    asked = 0

    def needed() -> set[str]:
        nonlocal asked
        asked += 1
        return {"a"}

    for step in range(20):
        lanes.upkeep.close_unneeded(100.0 + step * PERIOD_S / 10, needed)
    assert asked == 2


def test_no_ticket_is_made_for_a_sick_lane_or_one_too_many() -> None:
    lanes = Lanes(LANE, max_lanes=1)
    lanes.upkeep.require("a", {"a"})
    with pytest.raises(Overloaded):
        lanes.upkeep.require("b", {"a"})
    lanes.lanes = [replace(LANE, state="quarantined", reason="nothing moved")]
    with pytest.raises(TransferFailed, match="nothing moved"):
        lanes.upkeep.require("a", set())
