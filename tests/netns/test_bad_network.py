"""Lanes over a network that delays, loses and parts: two processes in network namespaces of their own, on one kernel.

One host name and one boot id on both sides, and yet no memory in common: what is claimed is not what is proved.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.netns.bad_network import HOSTS, BadNetwork, why_not

PEER = Path(__file__).with_name("peer.py")
PATIENCE_S = 60.0
REASON = why_not()

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON or "possible")]


class Peer:
    """A process on one of the hosts, and what it has said so far."""

    def __init__(self, network: BadNetwork, side: int, what: str, *arguments: object) -> None:
        command = network.command(side, sys.executable, str(PEER), what, HOSTS[side], *map(str, arguments))
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(PEER.parents[2])}
        )
        self._lines: queue.Queue[str] = queue.Queue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def hear(self, word: str) -> str:
        """Waits for the next line that begins with this word and returns the rest; earlier lines are dropped."""
        while True:
            line = self._lines.get(timeout=PATIENCE_S)
            assert line, "the peer has ended"
            if line.split()[0] == word:
                return line[len(word) + 1 :].strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put("")


class Pair:
    def __init__(self, network: BadNetwork, stall_s: float) -> None:
        self.receiver = Peer(network, 1, "receive", stall_s)
        self.sender = Peer(network, 0, "send", stall_s, HOSTS[1], self.receiver.hear("port"))

    def kill(self) -> None:
        self.sender.kill()
        self.receiver.kill()


@pytest.fixture
def network() -> Iterator[BadNetwork]:
    network = BadNetwork()
    yield network
    network.close()


@pytest.fixture
def pair(network: BadNetwork, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(network, request.param)
    yield pair
    pair.kill()


patient = pytest.mark.parametrize("pair", [20.0], indirect=True, ids=["patient"])
hasty = pytest.mark.parametrize("pair", [1.0], indirect=True, ids=["hasty"])


@patient
def test_blocks_arrive_over_a_slow_and_lossy_link(network: BadNetwork, pair: Pair) -> None:
    for peer in (pair.receiver, pair.sender):
        assert peer.hear("over") == "gloo no memory in common: Connection refused", "one kernel is not one memory"
    network.delay_s = 0.03
    assert [int(pair.receiver.hear("block")) for _ in range(20)] == list(range(20))
    network.delay_s, network.loss = 0.0, 0.02
    while network.num_lost < 20:
        pair.receiver.hear("block")


@hasty
def test_both_sides_give_up_a_cut_link_and_meet_again(network: BadNetwork, pair: Pair) -> None:
    pair.receiver.hear("block")
    network.cut = True
    assert pair.sender.hear("lost")
    assert pair.receiver.hear("lost")
    network.cut = False
    assert pair.receiver.hear("over").startswith("gloo")
    for _ in range(20):
        pair.receiver.hear("block")
