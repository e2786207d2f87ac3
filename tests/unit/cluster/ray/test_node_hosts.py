"""Ranks on nodes, as the supervisor reaches them, while Ray does not have the node."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.ray import node_hosts
from cluster.ray.node_hosts import NodeHost, NodeLink
from cluster.supervision.rank import Loading
from cluster.supervision.rank_messages import RANK_MESSAGES
from protos.errors import Unavailable, WorkerLost

LOADING = Loading(share=0.5)


class Driver:
    """Answers calls of a node with what the test has prepared; afterwards Ray does not have the node."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.methods: list[str] = []
        self.faults: list[str] = []

    async def call(self, method: str, address: str, on_node: str, *_: object, kind: object) -> Any:
        self.methods.append(on_node)
        answer = self._answers.pop(0) if self._answers else Unavailable("away")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def doubt(self, reason: str, what: str) -> None:
        self.faults.append(reason)


def node(driver: Any, orphan_s: float = 60.0) -> NodeHost:
    return NodeHost("n1", driver, orphan_s)


async def test_a_machine_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker stayed "starting" forever."""
    monkeypatch.setattr(node_hosts, "CONTACT_S", 0.0)
    with pytest.raises(WorkerLost, match=r"n1 for 0.01 s"):
        await node(Driver(), orphan_s=0.01).attach("d0.1.0", 9)


async def test_a_rank_is_found_again_after_its_node_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_hosts, "FIND_S", 0.0)
    driver = Driver(Unavailable("lost"), Unavailable("still away"), 9, [RANK_MESSAGES.encode("Loading", LOADING)])
    assert await NodeLink("d0.1.0", 9, node(driver)).news() == (LOADING,)
    assert driver.methods == ["news", "attach", "attach", "news"]
    assert [bool(fault) for fault in driver.faults] == [True, False], "people are told meanwhile"


async def test_a_rank_that_has_ended_is_not_looked_for() -> None:
    with pytest.raises(WorkerLost, match="signal 9"):
        await NodeLink("d0.1.0", 9, node(Driver(WorkerLost("it was ended by signal 9")))).news()


async def test_a_process_is_not_started_twice_on_a_node_that_is_lost() -> None:
    driver = Driver(Unavailable("lost"))
    with pytest.raises(WorkerLost, match="lost"):
        await node(driver).start("d0.1.0", {}, "")
    assert driver.methods == ["start"]
