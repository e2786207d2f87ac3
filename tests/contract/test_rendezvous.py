"""The rendezvous server of lanes: what a torch.distributed store must do, and what strangers must not."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from kvtransfer.transports.rendezvous.rendezvous_key import CLAIM_BYTES, MAC_BYTES, NONCE_BYTES, WrongKey, accept, claim
from kvtransfer.transports.rendezvous.rendezvous_store import (
    MAX_LANES,
    MAX_STRANGERS,
    RendezvousServer,
    RendezvousStore,
)

Client = Callable[..., RendezvousStore]


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    yield server
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lane rendezvous"]


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[Client]:
    stores: list[RendezvousStore] = []

    def connect(prefix: str = "lane/") -> RendezvousStore:
        stores.append(store := RendezvousStore("127.0.0.1", server.port, prefix, key=server.key, wait_s=10.0))
        return store

    yield connect
    for store in stores:
        store.close()


def test_a_value_is_read_by_the_others(client: Client) -> None:
    first, other, stranger = client(), client(), client("another lane/")
    first.set("key", b"\x00value\xff" * 10_000)
    assert other.get("key") == b"\x00value\xff" * 10_000
    assert other.check(["key"])
    assert not other.check(["key", "missing"])
    assert not stranger.check(["key"])


def test_waiting_ends_when_it_is_said(client: Client) -> None:
    first, other = client(), client()
    heard: list[bytes] = []
    waiter = threading.Thread(target=lambda: heard.append(other.get("late")))
    waiter.start()
    first.set("late", "now")
    waiter.join()
    assert heard == [b"now"]


def test_waiting_for_nobody_ends_too(client: Client) -> None:
    with pytest.raises(TimeoutError, match="never"):
        client().wait(["never"], timedelta(seconds=0.01))


def test_numbers_add_up_and_only_rise(client: Client) -> None:
    first, other = client(), client()
    assert first.add("count", 0) == 0
    assert first.add("count", 2) == 2
    assert other.add("count", 3) == 5
    other.raise_to("count", 4)
    assert first.add("count", 0) == 5
    other.raise_to("count", 6)
    other.raise_to("count", 6)
    assert first.add("count", 0) == 6


def test_forgetting_removes_only_its_keys(client: Client) -> None:
    first, stranger = client(), client("another lane/")
    for store in (first, stranger):
        store.set("1/here", "x")
        store.set("10/here", "x")
    first.delete("1/")
    assert not first.check(["1/here"])
    assert first.check(["10/here"])
    assert stranger.check(["1/here"])


def test_a_clients_last_message_is_published_when_it_is_lost(client: Client) -> None:
    killed, closed, other = client(), client(), client()
    killed.set_on_disconnect("0/gone", "rank 0")
    closed.set_on_disconnect("1/gone", "rank 1")
    closed.set_on_disconnect("", "")
    assert not other.check(["0/gone"])
    for store in (closed, killed):
        store.close()
    assert other.get("0/gone") == b"rank 0"
    assert not other.check(["1/gone"]), "it had said goodbye"


def test_a_wait_ends_when_a_look_finds_that_it_is_in_vain(client: Client) -> None:
    store = client()

    def in_vain() -> None:
        raise ConnectionError("the other one is gone")

    store.look = in_vain
    with pytest.raises(ConnectionError, match="is gone"):
        store.get("never")


def test_lanes_that_nobody_asks_for_are_forgotten_in_the_end(server: RendezvousServer, client: Client) -> None:
    """A worker that restarts often leaves a lane each time."""
    remaining = client("p0#0>d0#1/")
    remaining.set("epoch", "7")
    other = client("")
    for life in range(2 * MAX_LANES):
        other.set(f"p0#{life + 1}>d0#1/epoch", "1")
        if life % 100 == 0:
            assert remaining.check(["epoch"]), "it is asked for now and then"
    assert server.num_values == MAX_LANES


def test_a_server_without_descriptors_serves_without_spinning(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client()
    store.set("turn", "is let in before the descriptors are used up")
    accept, refused = socket.socket.accept, 0

    def full(self: socket.socket) -> None:
        nonlocal refused
        refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(client)
        while not refused:
            store.set("turn", "0")
        for turn in range(1000):
            store.set("turn", str(turn))
        assert refused < 100
        monkeypatch.setattr(socket.socket, "accept", accept)
        coming.result().set("late", "but in the end")
    assert store.get("late") == b"but in the end"


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
        b"\xff" * 64,
        b"\x00\xff\xff\xff\x7f\x00\x00\x00\x00",
        b"\x09" + b"\x00" * 8,
        b"\x02\x01\x00\x00\x00\x01\x00\x00\x00ab",
        b"",
    ],
    ids=["http", "noise", "huge", "unknown verb", "half a number", "nothing"],
)
def test_a_client_that_sends_nonsense_is_disconnected_alone(
    server: RendezvousServer, client: Client, noise: bytes
) -> None:
    store = client()
    store.set("key", "kept")
    with socket.create_connection(("127.0.0.1", server.port), 10.0) as stranger:
        stranger.sendall(claim(server.key, stranger.recv(NONCE_BYTES), bytes(NONCE_BYTES)))
        assert len(stranger.recv(100)) == MAC_BYTES
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert store.get("key") == b"kept"


def test_a_number_that_is_none_costs_the_connection_only(client: Client) -> None:
    store, other = client(), client()
    store.set("word", "no number")
    with pytest.raises(ConnectionError):
        store.add("word", 1)
    assert other.get("word") == b"no number"


def test_a_server_that_did_not_answer_in_time_is_not_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as slow:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(
                RendezvousStore, "127.0.0.1", slow.getsockname()[1], "lane/", key=b"k", wait_s=1.0, answer_s=1.0
            )
            connection, _ = slow.accept()
            connection.sendall(bytes(NONCE_BYTES))
            connection.sendall(accept(b"k", bytes(NONCE_BYTES), connection.recv(CLAIM_BYTES)))
            store = made.result()
        store._socket.settimeout(0.05)
        with connection, pytest.raises(TimeoutError):
            store.get("one")
        with pytest.raises(OSError, match="Bad file descriptor"):
            store.get("another")


def test_a_closed_server_is_an_error_at_once(server: RendezvousServer, client: Client) -> None:
    store = client()
    server.close()
    with pytest.raises(OSError, match=r"gone|reset|[Bb]roken"):
        store.add("epoch", 0)
    with pytest.raises(ConnectionRefusedError):
        client()


# -- the key -----------------------------------------------------------------------------------------------------------


def test_a_client_with_another_key_is_refused_and_can_tell_why(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(WrongKey, match="it has another key"):
            RendezvousStore("127.0.0.1", server.port, "lane/", key=b"guessed", wait_s=1.0)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == [
        "a connection from 127.0.0.1 did not have the key of the rendezvous server: it was closed"
    ], "a scan must not fill the log"


@pytest.mark.parametrize(
    "spoken",
    [
        b"",
        struct.pack("<BII", 0, 3, 4) + b"keylies",  # what a client says after it has proved the key
        bytes(64),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["nothing", "a request", "zeros", "http"],
)
def test_a_stranger_neither_reads_nor_writes(server: RendezvousServer, client: Client, spoken: bytes) -> None:
    store = client("")
    store.set("key", b"kept")
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        assert len(stranger.recv(100)) == NONCE_BYTES
        stranger.sendall(spoken)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert store.get("key") == b"kept"


def test_a_claim_that_was_overheard_is_of_no_use_again(server: RendezvousServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as honest:
        spoken = claim(server.key, honest.recv(NONCE_BYTES), bytes(NONCE_BYTES))
        honest.sendall(spoken)
        assert len(honest.recv(100)) == MAC_BYTES
    with socket.create_connection(("127.0.0.1", server.port)) as thief:
        thief.recv(NONCE_BYTES)
        thief.sendall(spoken)
        assert thief.recv(100) == b""


def test_strangers_who_say_nothing_keep_nobody_out(server: RendezvousServer, client: Client) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_STRANGERS + 1)]
    try:
        assert len(strangers[0].recv(NONCE_BYTES)) == NONCE_BYTES
        assert strangers[0].recv(100) == b"", "the oldest makes room"
        client().set("key", "value")
        assert client().get("key") == b"value"
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_client_displaced_by_a_stranger_reconnects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        made = pool.submit(RendezvousStore, "127.0.0.1", port, "lane/", key=b"secret", wait_s=1.0, answer_s=10.0)
        for is_kept in (False, True):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                claimed = connection.recv(CLAIM_BYTES)
                if is_kept:
                    connection.sendall(accept(b"secret", bytes(NONCE_BYTES), claimed))
                    made.result().close()


def test_a_client_detects_a_stranger_at_the_servers_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(1) as pool:
        made = pool.submit(
            RendezvousStore, "127.0.0.1", taken.getsockname()[1], "lane/", key=b"secret", wait_s=1.0, answer_s=10.0
        )
        connection, _ = taken.accept()
        with connection:
            connection.sendall(bytes(NONCE_BYTES))
            assert b"secret" not in connection.recv(CLAIM_BYTES)
            connection.sendall(bytes(MAC_BYTES))
            with pytest.raises(WrongKey, match="the rendezvous server does not have the key"):
                made.result()
