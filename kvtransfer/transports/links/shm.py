"""Links within one host: a ring of slots in memory that both ranks map, and a socket that announces full slots.

    source rank                     ring of the pair, made by the destination                     destination rank
    payload ── memcpy ──▶ [slot][slot][slot][slot] ── memcpy ──▶ payload
            ── "n bytes more" ─────── socket ───────▶        ◀── "a slot is free" ── socket ──

On a CPU the ring is a memfd, on a GPU the destination's device memory behind a CUDA IPC handle (`device_memory`).
Neither has a name, so none can be left behind: a ring is freed with the last process that maps it, however that process
ends. Headers travel in the socket itself. A peer that dies closes it, which the other end notices at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from kvtransfer.transports.links import device_memory
from kvtransfer.transports.links.links import LinkWork

NUM_SLOTS = 4
MAX_SLOT_BYTES = 4 * 2**20  # with 1 MiB slots waited for each other: 6 GB/s instead of 9
TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<I{TOKEN_BYTES}s")  # the rank, and a token that only the rendezvous gives
_FILLED = struct.Struct("<BI")  # a mark that no header begins with, and the number of bytes in the next slot
_SLOT = struct.Struct("<I")  # bytes of a slot, before the handle
_PROVED = b"seen"
_MARK = 0xFE
_FREED = b"\x01"
_MAX_MESSAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The memory's length cannot be changed through the descriptor: access beyond a new end would kill the other
process."""

_cuda: Any = torch.cuda


class LinkBroken(RuntimeError):
    """The peer is gone, silent, or breaks the protocol. A RuntimeError, like a process group's."""


class Ring:
    """The slots of one pair of ranks, as one flat tensor of bytes. `shared`: the handle with which the peer maps it."""

    def __init__(self, memory_B: torch.Tensor, slot_bytes: int, shared: tuple[list[int], bytes]) -> None:
        self.memory_B = memory_B
        self.slot_bytes = slot_bytes
        self.num_slots = memory_B.numel() // slot_bytes
        self.shared = shared

    @classmethod
    def make(cls, device: str, slot_bytes: int) -> Ring:
        num_bytes = NUM_SLOTS * slot_bytes
        if torch.device(device).type == "cuda":
            memory_B, handle, fd = device_memory.shared(device, num_bytes)
            return cls(memory_B, slot_bytes, ([fd], handle))
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(_map(fd, num_bytes), slot_bytes, ([fd], b""))

    @classmethod
    def find(cls, fds: Sequence[int], handle: bytes, slot_bytes: int, device: str = "cpu") -> Ring:
        """Maps the peer's memory. Takes over the file descriptors. Raises LinkBroken for memory that could shrink."""
        if handle:
            memory_B = device_memory.mapped(device, handle, NUM_SLOTS * slot_bytes, fds[0])
            return cls(memory_B, slot_bytes, ([], handle))
        try:
            _require_sealed(fds[0], NUM_SLOTS * slot_bytes)
            return cls(_map(fds[0], NUM_SLOTS * slot_bytes), slot_bytes, ([], b""))
        finally:
            os.close(fds[0])

    def unlink(self) -> None:
        """The peer has mapped it, or never will."""
        for fd in self.shared[0]:
            os.close(fd)
        self.shared = ([], b"")

    def slot(self, index: int, num_bytes: int) -> torch.Tensor:
        start = index % self.num_slots * self.slot_bytes
        return self.memory_B[start : start + num_bytes]


def _require_sealed(fd: int, num_bytes: int) -> None:
    sealed, length = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
    if sealed & _SEALS != _SEALS or length != num_bytes:
        raise LinkBroken(f"the peer's memory has {length} bytes of {num_bytes}, or is not sealed")


def _map(fd: int, num_bytes: int) -> torch.Tensor:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(fd, num_bytes, flags=flags), dtype=torch.uint8)


class ShmLink:
    """One end of the ring and the socket between two ranks; `send` and `receive` are never called on the same end.

    `slots_done` counts what this end has filled or emptied, `slots_free` what the sending end may fill.
    """

    def __init__(self, connection: socket.socket, ring: Ring) -> None:
        self._connection = connection
        self._ring = ring
        self._slots_done = 0
        self._slots_free = ring.num_slots

    def write(self, message: bytes, timeout_s: float) -> None:
        self._guarded(timeout_s, lambda: self._connection.send(message))

    def read(self, timeout_s: float) -> bytes:
        message: bytes = self._guarded(timeout_s, lambda: self._connection.recv(_MAX_MESSAGE))
        if not message:
            raise LinkBroken("the peer closed the connection")
        return message

    def send(self, part_B: torch.Tensor, timeout_s: float) -> None:
        for piece_B in torch.split(part_B, self._ring.slot_bytes):
            while not self._slots_free:
                self._slots_free += len(self.read(timeout_s))
            _copy(self._ring.slot(self._slots_done, piece_B.numel()), piece_B)
            self._slots_done += 1
            self._slots_free -= 1
            self.write(_FILLED.pack(_MARK, piece_B.numel()), timeout_s)

    def flush(self, timeout_s: float) -> None:
        while self._slots_free < self._ring.num_slots:
            self._slots_free += len(self.read(timeout_s))

    def receive(self, part_B: torch.Tensor, timeout_s: float) -> None:
        done = 0
        while done < part_B.numel():
            mark, num_bytes = self._filled(self.read(timeout_s))
            if mark != _MARK or not 0 < num_bytes <= min(self._ring.slot_bytes, part_B.numel() - done):
                raise LinkBroken(f"the peer announces {num_bytes} bytes in a slot, which holds fewer")
            _copy(part_B[done : done + num_bytes], self._ring.slot(self._slots_done, num_bytes))
            self._slots_done += 1
            done += num_bytes
            self.write(_FREED, timeout_s)

    def show(self, timeout_s: float) -> None:
        """Proves the ring as the destination: sends it over and checks the source's change."""
        number = secrets.token_bytes(TOKEN_BYTES)
        number_B = self._ring.slot(0, TOKEN_BYTES)
        number_B.copy_(torch.frombuffer(bytearray(number), dtype=torch.uint8))
        fds, handle = self._ring.shared
        message = _SLOT.pack(self._ring.slot_bytes) + handle
        self._guarded(timeout_s, lambda: socket.send_fds(self._connection, [message], fds))
        self.read(timeout_s)
        turned = bytes(255 - byte for byte in number)
        if number_B.cpu().numpy().tobytes() != turned:
            raise LinkBroken("the source has not written its proof into the ring")
        self.write(_PROVED, timeout_s)

    def shut(self) -> None:
        with suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _filled(self, message: bytes) -> tuple[int, int]:
        if len(message) != _FILLED.size:
            raise LinkBroken("a payload was expected, and something else came")
        mark, num_bytes = _FILLED.unpack(message)
        return int(mark), int(num_bytes)

    def _guarded(self, timeout_s: float, action: Callable[[], Any]) -> Any:
        try:
            self._connection.settimeout(timeout_s)
            return action()
        except TimeoutError as error:
            raise LinkBroken(f"the peer did nothing for {timeout_s:g} s") from error
        except OSError as error:
            raise LinkBroken(f"the connection to the peer is gone: {error.strerror or error}") from error


def _copy(target_B: torch.Tensor, source_B: torch.Tensor) -> None:
    """On a CPU one thread copies, without Python's lock. On a GPU the bytes have arrived when this returns."""
    if target_B.is_cuda or source_B.is_cuda:
        target_B.copy_(source_B)
        _cuda.current_stream().synchronize()
    else:
        ctypes.memmove(target_B.data_ptr(), source_B.data_ptr(), target_B.numel())


class ShmGroup:
    """All links of one rank, with the interface of a process group. The thread that waits for work does it, in order.

    Messages of tag `HEADER_TAG` are small and lie in the socket; those of another tag go through the ring.
    """

    def __init__(self, links: dict[int, ShmLink], *, header_tag: int) -> None:
        self._links = links
        self._header_tag = header_tag

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        link, (part_B,) = self._links[rank], tensors
        if tag == self._header_tag:
            return LinkWork(lambda timeout_s: link.write(part_B.numpy().tobytes(), timeout_s))
        return LinkWork(lambda timeout_s: link.send(part_B, timeout_s))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        link, (part_B,) = self._links[rank], tensors
        if tag == self._header_tag:
            return LinkWork(lambda timeout_s: _hear_into(link, part_B, timeout_s))
        return LinkWork(lambda timeout_s: link.receive(part_B, timeout_s))

    def flush(self, timeout: timedelta) -> None:
        for link in self._links.values():
            link.flush(timeout.total_seconds())

    def abort(self) -> None:
        """Callable from any thread."""
        for link in self._links.values():
            link.shut()

    def close(self) -> None:
        self.abort()
        close_all(self._links.values())


def _hear_into(link: ShmLink, header_B: torch.Tensor, timeout_s: float) -> None:
    message = link.read(timeout_s)
    if len(message) != header_B.numel():
        raise LinkBroken(f"a header of {header_B.numel()} bytes was expected, {len(message)} came")
    header_B.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))


class ShmListener:
    """Lets source ranks prove to a destination rank that they share its memory, then closes.

    It listens in this machine's memory: only processes of this host and network namespace can connect. The destination
    writes a random number into the ring, and the source must turn every bit of it there."""

    def __init__(self, device: str, slot_bytes: int) -> None:
        self._device = device
        self._slot_bytes = slot_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._name = secrets.token_bytes(TOKEN_BYTES)
        self._listener = _socket()
        self._listener.bind(_abstract(self._name))
        self._listener.listen()

    @property
    def notice(self) -> bytes:
        """The address and token for sources; published in the lane's rendezvous store."""
        return self._name + self._token

    def accept(self, source_ranks: Iterable[int], timeout_s: float) -> dict[int, ShmLink]:
        """Accepts a connection from each source rank and returns their links. Raises LinkBroken."""
        links: dict[int, ShmLink] = {}
        missing = set(source_ranks)
        try:
            while missing:
                rank, link = self._accept(timeout_s)
                if rank in missing:
                    missing.remove(rank)
                    links[rank] = link
                else:
                    link.close()
        except BaseException:
            close_all(links.values())
            raise
        finally:
            self._listener.close()
        return links

    def close(self) -> None:
        self._listener.close()

    def _accept(self, timeout_s: float) -> tuple[int, ShmLink]:
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            raise LinkBroken(f"no source rank connected: {error}") from error
        try:
            ring = Ring.make(self._device, self._slot_bytes)
            try:
                link = ShmLink(connection, ring)
                rank, token = _hello(link.read(timeout_s))
                if not secrets.compare_digest(token, self._token):
                    raise LinkBroken("a process without the token connected")
                link.show(timeout_s)
            finally:
                ring.unlink()
        except BaseException:
            connection.close()
            raise
        return rank, link


def _hello(message: bytes) -> tuple[int, bytes]:
    """Reads a rank and its token; any other message gives a token that no rank has."""
    return _HELLO.unpack(message) if len(message) == _HELLO.size else (0, b"")


def close_all(ends: Iterable[ShmLink | socket.socket]) -> None:
    for end in ends:
        end.close()


def connect(notice: bytes, rank: int) -> socket.socket:
    """Connects to a destination's listener. Raises OSError if it cannot be reached, mostly from another host."""
    connection = _socket()
    try:
        connection.connect(_abstract(notice[:TOKEN_BYTES]))
        connection.send(_HELLO.pack(rank, notice[TOKEN_BYTES:]))
    except OSError:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, timeout_s: float, device: str = "cpu") -> ShmLink:
    """The source's part of the proof. Takes the connection over. Raises LinkBroken."""
    try:
        connection.settimeout(timeout_s)
        handle, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
        (slot_bytes,) = _SLOT.unpack_from(handle)
        ring = Ring.find(fds, handle[_SLOT.size :], slot_bytes, device)
        number_B = ring.slot(0, TOKEN_BYTES)
        number_B.bitwise_not_()
        link = ShmLink(connection, ring)
        link.write(_PROVED, timeout_s)
        if link.read(timeout_s) != _PROVED:
            raise LinkBroken("the destination does not see what was written into its memory")
    except (OSError, RuntimeError, struct.error, ValueError, IndexError) as error:
        connection.close()
        raise LinkBroken(f"memory cannot be shared with the destination: {error}") from error
    return link


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(name: bytes) -> str:
    """An address outside every file system: it ends with its listener."""
    return f"\0baton-kv-{name.hex()}"
