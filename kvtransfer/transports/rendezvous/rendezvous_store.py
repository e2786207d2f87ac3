"""The rendezvous of the ranks of lanes: small values by key, over TCP, as a torch.distributed store.

torch's own TCPStore looks up the name of each client in DNS, in the server too: one lost DNS packet delays every lane
for five seconds. This store uses addresses only, fails immediately without a server, and can delete keys. A client
that does not prove that it has the server's key (`rendezvous.key`) can neither read nor write.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

from torch._C._distributed_c10d import Store

from kvtransfer.transports.rendezvous import rendezvous_key as rendezvous_key
from kvtransfer.transports.rendezvous.rendezvous_key import WrongKey
from protos.listening import bound, netloc

log = logging.getLogger("baton.kvtransfer")

_REQUEST = struct.Struct("<BII")  # what, bytes of the key, bytes of the value
_REPLY = struct.Struct("<BI")  # found?, bytes of the value
_COUNT = struct.Struct("<q")
_MAX_BYTES = 2**20
_LONGEST_POLL_S = 0.005
_LOOK_S = 0.05
_PAUSE_S = 0.2
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLAIMS = 3  # the server also closes a connection whose place another stranger takes before its claim is read
MAX_LANES = 1024
MAX_STRANGERS = 64
"""Connections that have not proved to have the key. One more, and the oldest is closed."""


class _What(IntEnum):
    SET = 0
    GET = 1
    ADD = 2
    RAISE = 3  # sets a key to this number, if that is less
    DELETE = 4  # deletes every key that begins with this one
    WILL = 5  # to be set when this client's connection ends; an empty value revokes the last


class RendezvousServer:
    """The server: one thread, all values in memory. Binds to `host` only; `port` 0 takes any free port.
    Clients need its `key`, a random one unless it is given.

    The part of a key before the first "/" names its lane. The server keeps the `MAX_LANES` lanes that were read last.
    A live lane reads its keys several times a minute.
    """

    def __init__(self, host: str, port: int = 0, *, key: bytes = b"") -> None:
        self.key = key or rendezvous_key.new_key()
        self._listener = bound(host, port)
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._lanes: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()  # least recently read first
        self._clients: dict[socket.socket, _Client] = {}
        self._strangers: dict[socket.socket, bytes] = {}  # and the nonce that each was sent, oldest first
        self._has_refused = False
        self._full = False  # the last connection could not be accepted
        self._resumes_s: float | None = None  # when the listener is watched again; None while it is
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop, stopped = socket.socketpair()
        self._selector.register(stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, args=(stopped,), name="lane rendezvous", daemon=True)
        self._thread.start()

    @property
    def num_values(self) -> int:
        return sum(map(len, tuple(self._lanes.values())))

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._stop.close()
        self._thread.join()

    def _serve(self, stopped: socket.socket) -> None:
        while True:
            wait_s = None if self._resumes_s is None else max(0.0, self._resumes_s - time.monotonic())
            ready = self._selector.select(wait_s)
            if self._resumes_s is not None and time.monotonic() >= self._resumes_s:
                self._resume()
            for key, _ in ready:
                if key.fileobj is stopped:
                    for end in (self._listener, stopped, *self._clients, *self._strangers):
                        end.close()
                    self._selector.close()
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    (self._hear if key.fileobj in self._clients else self._examine)(key.fileobj)

    def _pause(self, error: OSError) -> None:
        """Stops accepting for a while: otherwise the waiting connection would wake the selector again and again."""
        if not self._full:
            log.error("no new lane can connect: %s; raise this worker's limit", error.strerror)
        self._full = True
        self._selector.unregister(self._listener)
        self._resumes_s = time.monotonic() + _PAUSE_S

    def _resume(self) -> None:
        if self._resumes_s is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._resumes_s = None

    def _welcome(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._pause(error)
            return  # otherwise the client has left already
        self._full = False
        client.settimeout(1.0)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = rendezvous_key.new_nonce()
        try:
            client.sendall(nonce)
        except OSError:
            client.close()  # it is gone again already
            return
        if len(self._strangers) == MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        self._strangers[client] = nonce
        self._selector.register(client, selectors.EVENT_READ)

    def _examine(self, stranger: socket.socket) -> None:
        """Makes a connection with the key a client. A client sends its claim in one piece; a shorter one is refused."""
        nonce = self._strangers.get(stranger)
        if nonce is None:
            return  # dismissed in this turn
        try:
            claimed = stranger.recv(rendezvous_key.CLAIM_BYTES)
            if claimed:
                stranger.sendall(rendezvous_key.accept(self.key, nonce, claimed))
        except WrongKey:
            self._refused(stranger)
            claimed = b""
        except OSError:
            claimed = b""
        if claimed:
            del self._strangers[stranger]
            self._clients[stranger] = _Client()
        else:
            self._dismiss(stranger)

    def _refused(self, stranger: socket.socket) -> None:
        level = logging.DEBUG if self._has_refused else logging.WARNING
        self._has_refused = True
        with suppress(OSError):
            host = stranger.getpeername()[0]
            log.log(
                level,
                "a connection from %s did not have the key of the rendezvous server: it was closed",
                host,
            )

    def _dismiss(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()
        self._resume()

    def _hear(self, client: socket.socket) -> None:
        known = self._clients[client]
        try:
            received = client.recv(65536)
            known.unread += received
            replies = b"".join(self._answers(known))
            if replies:
                client.sendall(replies)
        except (OSError, ValueError):
            received = b""
        if not received:
            self._selector.unregister(client)
            del self._clients[client]
            client.close()
            if known.will is not None:
                self._answer(_What.SET, *known.will)
            self._resume()

    def _answers(self, client: _Client) -> list[bytes]:
        replies, unread = [], client.unread
        while len(unread) >= _REQUEST.size:
            what, key_bytes, value_bytes = _REQUEST.unpack_from(unread)
            end = _REQUEST.size + key_bytes + value_bytes
            if end > _MAX_BYTES:
                raise ValueError(f"a request of {end} bytes")
            if len(unread) < end:
                break
            key = bytes(unread[_REQUEST.size : _REQUEST.size + key_bytes])
            value = bytes(unread[_REQUEST.size + key_bytes : end])
            del unread[:end]
            if _What(what) is _What.WILL:
                client.will = (key, value) if value else None
            answer = self._answer(_What(what), key, value)
            replies.append(_REPLY.pack(answer is not None, len(answer or b"")) + (answer or b""))
        return replies

    def _answer(self, what: _What, key: bytes, value: bytes) -> bytes | None:
        values = self._values_of(key)
        if what is _What.SET:
            values[key] = value
        elif what in (_What.ADD, _What.RAISE):
            if len(value) != _COUNT.size:
                raise ValueError("not a number")
            before, given = int(values.get(key, b"0")), _COUNT.unpack(value)[0]
            values[key] = b"%d" % (before + given if what is _What.ADD else max(before, given))
        elif what is _What.DELETE:
            for other in [other for other in values if other.startswith(key)]:
                del values[other]
        return values.get(key)

    def _values_of(self, key: bytes) -> dict[bytes, bytes]:
        lane = key.partition(b"/")[0]
        values = self._lanes.setdefault(lane, {})
        self._lanes.move_to_end(lane)
        if len(self._lanes) > MAX_LANES:
            self._lanes.popitem(last=False)
        return values


@dataclass(slots=True, eq=False)
class _Client:
    unread: bytearray = field(default_factory=bytearray)
    will: tuple[bytes, bytes] | None = None


class RendezvousStore(Store):
    """A client of a server, under a prefix. After a fault of the connection every call raises OSError; WrongKey is a
    kind of it.

    `wait_s` bounds the wait for values of other ranks, `answer_s` that for the server itself. While it waits it calls
    `look` at intervals, which may raise to end the wait. torch calls the methods from its own threads. Keep the object
    alive as long as a process group made with it.
    """

    def __init__(self, host: str, port: int, prefix: str, *, key: bytes, wait_s: float, answer_s: float = 2.0) -> None:
        super().__init__()
        self._prefix = prefix
        self._wait_s = wait_s
        self.look: Callable[[], None] | None = None
        self._lock = threading.Lock()
        for tries_left in reversed(range(_CLAIMS)):
            self._socket = self._connect(host, port, answer_s)
            try:
                self._prove(key)
                return
            except OSError as error:
                self._socket.close()
                if not tries_left or not isinstance(error.__cause__, ConnectionError):
                    raise

    @staticmethod
    def _connect(host: str, port: int, answer_s: float) -> socket.socket:
        connection = socket.create_connection((host, port), answer_s)
        if connection.getsockname() == connection.getpeername():
            connection.close()
            raise ConnectionRefusedError(f"no server listens at {netloc(host, port)}")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _prove(self, key: bytes) -> None:
        server_nonce, nonce = self._receive(rendezvous_key.NONCE_BYTES), rendezvous_key.new_nonce()
        self._socket.sendall(rendezvous_key.claim(key, server_nonce, nonce))
        try:
            answer = self._receive(rendezvous_key.MAC_BYTES)
        except ConnectionError as error:
            raise WrongKey("the rendezvous server closed the connection: it has another key or version") from error
        rendezvous_key.check(key, server_nonce, nonce, answer)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_What.SET, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(_What.GET, key) or b""

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_What.ADD, key, _COUNT.pack(amount)) or b"0")

    def raise_to(self, key: str, value: int) -> None:
        self._ask(_What.RAISE, key, _COUNT.pack(value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(_What.GET, key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        begun_s = time.monotonic()
        deadline_s, next_look_s = begun_s + (timeout.total_seconds() if timeout else self._wait_s), begun_s + _LOOK_S
        poll_s = 0.0005
        while not self.check(keys):
            now = time.monotonic()
            if now > deadline_s:
                raise TimeoutError(f"the other ranks did not publish {', '.join(keys)} in time")
            if self.look is not None and now > next_look_s:
                self.look()
                next_look_s = now + _LOOK_S
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def set_on_disconnect(self, key: str, value: str) -> None:
        """Sets a value to be published when this connection ends in any way; "" revokes the previous one."""
        self._ask(_What.WILL, key, value.encode())

    def delete(self, key: str) -> None:
        self._ask(_What.DELETE, key)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, what: _What, key: str, value: bytes = b"") -> bytes | None:
        name = (self._prefix + key).encode()
        with self._lock:
            try:
                self._socket.sendall(_REQUEST.pack(what, len(name), len(value)) + name + value)
                found, length = _REPLY.unpack(self._receive(_REPLY.size))
                answer = self._receive(length)
            except OSError:
                self._socket.close()  # a late answer must not be read as the next one
                raise
        return answer if found else None

    def _receive(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            piece = self._socket.recv(length - len(received))
            if not piece:
                raise ConnectionError("the rendezvous server is gone")
            received += piece
        return received
