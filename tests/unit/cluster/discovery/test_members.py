"""How a gateway comes to know workers without Redis (with it: tests/cluster/test_redis_discovery.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from cluster.discovery.members import AnnouncedMembers, Announcements, StaticDiscovery
from protos.errors import WorkerLost
from protos.values import WorkerRole
from router.fleet.successors import Successor


class Joined:
    """Members that remember who they are."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.successors: dict[str, Successor | None] = {}

    def set_degraded(self, reason: str) -> None:
        """Not looked at here."""

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        self.successors[worker_id] = successor

    def add_worker(self, address: str, *, worker_id: str) -> None:
        self.addresses[worker_id] = address

    async def remove_worker(self, worker_id: str) -> None:
        self.addresses.pop(worker_id, None)


async def test_in_one_process_announced_means_joined() -> None:
    members, announcer = Joined(), Announcements()
    loading = Successor(role=WorkerRole.DECODE, loaded=0.4)
    await announcer.announce("prefill-0", "h:9")
    await announcer.begin(AnnouncedMembers(members).publish)
    assert members.addresses == {"prefill-0": "h:9"}, "announced before the gateway was there"
    await announcer.starting("decode-0", loading)
    assert members.successors == {"decode-0": loading}
    await announcer.announce("decode-0", "h:1")
    await announcer.announce("decode-0", "h:2")
    assert members.addresses == {"prefill-0": "h:9", "decode-0": "h:2"}
    await announcer.withdraw("decode-0")
    assert members.addresses == {"prefill-0": "h:9"}
    announcer.end()
    await announcer.withdraw("prefill-0")
    assert members.addresses == {"prefill-0": "h:9"}, "left to the next process"


async def test_a_worker_at_a_given_address_joins_once_it_answers() -> None:
    answers: Iterator[WorkerLost | str] = iter([WorkerLost("not up yet"), WorkerLost("not up yet"), "prefill-7"])

    async def identify(address: str) -> str:
        answer = next(answers)
        if isinstance(answer, WorkerLost):
            raise answer
        return answer

    members = Joined()
    async with asyncio.timeout(60):
        await StaticDiscovery(["h:1"], identify=identify, period_s=0.0).follow(members)
    assert members.addresses == {"prefill-7": "h:1"}
