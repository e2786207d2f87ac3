"""The contract of links, over shared memory and the network, between any numbers of ranks. A transport is chosen by
what all ranks can prove."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.lane_rules import LaneConfig, Preference
from kvtransfer.transports.links.choice import TransportRefused, open_links
from kvtransfer.transports.links.host_staged import HostStaged, why_no_nccl
from kvtransfer.transports.links.links import HEADER_TAG, PAYLOAD_TAG, LaneRank, Links, Meeting
from kvtransfer.transports.links.shm import LinkBroken, Ring, ShmListener, connect, prove
from kvtransfer.transports.links.staging_memory import Staging
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousServer, RendezvousStore
from tests.contract.site import WIRED

PATIENCE = timedelta(seconds=20)
CONFIG = LaneConfig(stall_s=20.0, message_bytes=1000)
KINDS = pytest.mark.parametrize("kind", WIRED)
NAMES = {"shm": "shm", "collective": "gloo"}


class Lane:
    """All ranks of a lane of `num_sources` to `num_destinations`, each with a link to every rank of the other side."""

    def __init__(self, num_sources: int, num_destinations: int) -> None:
        self.server = RendezvousServer("127.0.0.1")
        self.size = num_sources + num_destinations
        self.sources = tuple(range(num_sources))
        self.destinations = tuple(range(num_sources, self.size))
        self.links: list[Links] = []
        self._stores: list[RendezvousStore] = []

    def open(self, *preferences: Preference) -> list[Links]:
        """Every rank in a thread of its own; a single preference is everybody's."""
        by_rank = preferences if len(preferences) > 1 else preferences * self.size
        with ThreadPoolExecutor(self.size) as pool:
            opening = [pool.submit(open_links, self._meeting(rank, by_rank[rank])) for rank in range(self.size)]
        self.links += [future.result() for future in opening if future.exception() is None]
        for future in opening:
            future.result()
        return self.links

    def close(self) -> None:
        for links in self.links:
            links.abort()
            links.close()
        for store in self._stores:
            store.close()
        self.server.close()

    def _meeting(self, rank: int, preference: Preference) -> Meeting:
        self._stores.append(
            store := RendezvousStore("127.0.0.1", self.server.port, "lane/", key=self.server.key, wait_s=CONFIG.stall_s)
        )
        sends = rank in self.sources
        at = LaneRank(
            rank=rank,
            size=self.size,
            peer_ranks=self.destinations if sends else self.sources,
            sends=sends,
            bind_host="127.0.0.1",
            device="cpu",
            config=replace(CONFIG, transport=preference),
        )
        return Meeting(at=at, store=store, epoch=0)


Opens = Callable[[int, int], Lane]


@pytest.fixture
def lane() -> Iterator[Opens]:
    lanes: list[Lane] = []

    def make(num_sources: int = 1, num_destinations: int = 1) -> Lane:
        lanes.append(Lane(num_sources, num_destinations))
        return lanes[-1]

    yield make
    for opened in lanes:
        opened.close()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def move(operation: Any, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> None:
    for work in [operation([tensor], rank, tag) for tensor in tensors]:
        work.wait(PATIENCE)


def beside(*works: Callable[[], object]) -> list[Any]:
    """Does all of it at once."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


@KINDS
@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 50_000])
def test_bytes_arrive_whatever_their_number(lane: Opens, kind: Preference, num_bytes: int) -> None:
    source, destination = lane(1, 1).open(kind)
    assert {source.transport, destination.transport} == {NAMES[kind]}
    sent, received = random_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    beside(
        lambda: move(source.payloads.send, torch.split(sent, 7000), 1, PAYLOAD_TAG),
        lambda: move(destination.payloads.recv, torch.split(received, 7000), 0, PAYLOAD_TAG),
    )
    assert torch.equal(received, sent)


@KINDS
@pytest.mark.parametrize(("num_sources", "num_destinations"), [(1, 2), (2, 1), (2, 4)])
def test_every_rank_reaches_every_peer(lane: Opens, kind: Preference, num_sources: int, num_destinations: int) -> None:
    """Each source sends each destination its own header and payload, all at the same time."""
    many = lane(num_sources, num_destinations)
    links = many.open(kind)

    def pieces(source: int, destination: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = 10 * source + destination
        return random_bytes(64, seed), random_bytes(5000, seed + 1000)

    def send(source: int) -> None:
        for destination in many.destinations:
            header, payload = pieces(source, destination)
            move(links[source].control.send, [header], destination, HEADER_TAG)
            move(links[source].payloads.send, [payload], destination, PAYLOAD_TAG)

    def receive(destination: int) -> None:
        for source in many.sources:
            header, payload = torch.zeros(64, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
            move(links[destination].control.recv, [header], source, HEADER_TAG)
            move(links[destination].payloads.recv, [payload], source, PAYLOAD_TAG)
            expected_header, expected_payload = pieces(source, destination)
            assert torch.equal(header, expected_header)
            assert torch.equal(payload, expected_payload)

    beside(
        *(lambda rank=rank: send(rank) for rank in many.sources),
        *(lambda rank=rank: receive(rank) for rank in many.destinations),
    )


@KINDS
@pytest.mark.parametrize("who", ["source", "destination"])
def test_a_wait_ends_when_either_end_severs(lane: Opens, kind: Preference, who: str) -> None:
    source, destination = lane(1, 1).open(kind)
    waiting = destination.control.recv([torch.zeros(8, dtype=torch.uint8)], 0, HEADER_TAG)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(waiting.wait, PATIENCE)
        (source if who == "source" else destination).abort()
        with pytest.raises(RuntimeError):
            outcome.result()


@KINDS
def test_a_wait_for_a_silent_peer_ends(lane: Opens, kind: Preference) -> None:
    _, destination = lane(1, 1).open(kind)
    with pytest.raises(RuntimeError):
        destination.control.recv([torch.zeros(8, dtype=torch.uint8)], 0, HEADER_TAG).wait(timedelta(milliseconds=20))


# -- payloads on a GPU without NCCL ------------------------------------------------------------------------------------


def test_payloads_may_go_through_host_memory(lane: Opens) -> None:
    """All parts of a payload are in transit at once, and every buffer is returned except an unfinished one."""
    links = lane(1, 1).open("collective")
    host = [Staging(device="cpu", max_bytes=2**20, pinned=True) for _ in links]
    source, destination = (HostStaged(link.payloads, memory) for link, memory in zip(links, host, strict=True))
    sent, received = random_bytes(50_000), torch.zeros(50_000, dtype=torch.uint8)
    beside(
        lambda: move(source.send, torch.split(sent, 7000), 1, PAYLOAD_TAG),
        lambda: move(destination.recv, torch.split(received, 7000), 0, PAYLOAD_TAG),
    )
    assert torch.equal(received, sent)
    assert not any(memory._taken for memory in host)
    before = host[1].num_free_bytes
    with pytest.raises(RuntimeError):
        destination.recv([received[:8]], 0, PAYLOAD_TAG).wait(timedelta(milliseconds=20))
    assert host[1].num_free_bytes < before, "gloo may still write into it"


@pytest.mark.parametrize(
    ("cards", "why"),
    [
        (("/a", "/b"), ""),
        (("/a", "/b", "/a"), "ranks 0 and 2 share a GPU, which NCCL refuses"),
        (("one/a", "two/a"), ""),
        (("/a", "!this build of torch has no NCCL"), "rank 1: this build of torch has no NCCL"),
    ],
)
def test_nccl_takes_each_rank_on_a_card_of_its_own(cards: Sequence[str], why: str) -> None:
    assert why_no_nccl(cards) == why


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preferences", "transport"),
    [
        (("auto",), "shm"),
        (("shm", "auto"), "shm"),
        (("auto", "shm"), "shm"),
        (("collective", "auto"), "gloo"),
        (("auto", "collective"), "gloo"),
    ],
)
def test_all_ranks_choose_alike(lane: Opens, preferences: tuple[Preference, ...], transport: str) -> None:
    links = lane(1, 1).open(*preferences)
    assert [link.transport for link in links] == [transport, transport]
    assert all(bool(link.why) == (transport == "gloo") for link in links), "what is not the best says why"


def test_one_rank_that_cannot_keeps_all_from_it(lane: Opens) -> None:
    links = lane(2, 2).open("auto", "auto", "auto", "collective")
    assert {link.transport for link in links} == {"gloo"}
    assert {link.why for link in links} == {"a worker's transport is set to collective"}


@pytest.mark.parametrize("preferences", [("shm", "collective"), ("collective", "shm")])
def test_a_required_transport_is_used_or_refused(lane: Opens, preferences: tuple[Preference, ...]) -> None:
    with pytest.raises(TransportRefused, match=r"transport is set to shm.* set to collective"):
        lane(1, 1).open(*preferences)


# -- shared memory -----------------------------------------------------------------------------------------------------


def test_a_stranger_without_the_token_gets_no_memory() -> None:
    listener = ShmListener("cpu", 100)
    connection = connect(listener.notice[:16] + bytes(16), 0)
    with pytest.raises(LinkBroken, match="without the token"):
        listener.accept([0], 5.0)
    assert connection.recv(1) == b""
    connection.close()


def test_who_says_no_hello_is_a_stranger() -> None:
    listener = ShmListener("cpu", 100)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0baton-kv-" + listener.notice[:16].hex())
    connection.send(b"?")
    with pytest.raises(LinkBroken, match="without the token"):
        listener.accept([0], 5.0)
    connection.close()


class Deaf(RendezvousStore):
    """Is cut off from the server once the ranks have proved what they share."""

    def get(self, key: str) -> bytes:
        if "/verdict/" in key:
            raise ConnectionError("the rendezvous server is gone")
        return super().get(key)


def test_a_lane_that_ends_while_it_is_opened_leaves_no_socket(lane: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane may be closed before anything was sent."""
    before = our_shm_sockets()
    monkeypatch.setattr(sys.modules[__name__], "RendezvousStore", Deaf)
    with pytest.raises(ConnectionError) as failed:
        lane(1, 1).open("shm")
    assert our_shm_sockets() == before, f"while {failed.value} still holds the frames it came through"


def our_shm_sockets() -> list[str]:
    """Inodes of this process's listening and answering sockets."""
    ours = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[6] for row in rows if row[-1].startswith("@baton-kv-") and f"socket:[{row[6]}]" in ours]


def test_who_does_not_write_into_the_memory_has_proved_nothing() -> None:
    """A source whose mapping is a copy has the descriptor, and the destination does not see its writes."""
    listener = ShmListener("cpu", 100)
    connection = connect(listener.notice, 0)

    def pretend() -> None:
        _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        os.close(fds[0])
        connection.send(b"seen")

    with ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend)
        with pytest.raises(LinkBroken, match="has not written its proof"):
            listener.accept([0], 5.0)
        pretending.result()
    connection.close()


@pytest.mark.parametrize("lie", ["unsealed", "too short"])
def test_memory_that_could_be_cut_off_is_not_mapped(lie: str) -> None:
    """Reading beyond its end would kill this process."""
    ring = Ring.make("cpu", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.shared[0][0], 0)
    ring.unlink()
    fd = os.memfd_create("baton-kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100 if lie == "too short" else 400)
    if lie == "too short":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(LinkBroken, match="bytes of 400, or is not sealed"):
        Ring.find([fd], b"", 100)


def test_a_door_that_is_not_there_is_an_error_at_once() -> None:
    listener = ShmListener("cpu", 100)
    notice = listener.notice
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(notice, 0)


def test_a_slot_that_cannot_be_ends_the_link(lane: Opens) -> None:
    """A peer's offsets are checked: no read goes beyond the ring."""
    source, destination = lane(1, 1).open("shm")
    liar = source.control._links[1]
    liar.write(b"\xfe" + (2**31).to_bytes(4, "little"), 5.0)
    with pytest.raises(LinkBroken, match="which holds fewer"):
        move(destination.payloads.recv, [torch.zeros(5000, dtype=torch.uint8)], 0, PAYLOAD_TAG)


def test_a_ring_has_no_name_and_leaves_nothing() -> None:
    def descriptors() -> list[str]:
        targets = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sorted(str(path) for path in targets if "baton" in str(path))

    gc.collect()  # rings of other tests
    before, names = descriptors(), set(Path("/dev/shm").iterdir())
    listener = ShmListener("cpu", 100)
    connection = connect(listener.notice, 3)
    proving, admitting = beside(lambda: prove(connection, 5.0), lambda: listener.accept([3], 5.0))
    assert len(descriptors()) == len(before) + 2, "one for each end's mapping"
    assert set(Path("/dev/shm").iterdir()) == names
    proving.close()
    admitting[3].close()
    del proving, admitting
    gc.collect()
    assert descriptors() == before


def test_a_ring_is_bounded() -> None:
    ring = Ring.make("cpu", 100)
    assert ring.memory_B.numel() == ring.num_slots * 100
    assert ring.slot(ring.num_slots, 100).data_ptr() == ring.slot(0, 100).data_ptr()
    ring.unlink()


def test_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]
