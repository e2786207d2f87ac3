"""Collectives between the ranks of one worker. Groups are objects, without a default group, so that a process can be in
many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp, Store

from protos.errors import UnreadableMessage, WorkerLost
from protos.values import LOOPBACK

_HEADER_BYTES = 8
_FIRST_BYTES = 4096
MAX_MESSAGE_BYTES = 2**30


class TensorParallel(Protocol):
    """The collectives that a layer may use. Every rank must make the same calls in the same order.

    Raises WorkerLost if a rank has ended: the group cannot be used any more.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def begin_all_reduce(self, x: torch.Tensor) -> Callable[[], None]:
        """Begins an all-reduce. `x` is the sum after a call of the returned function; on a GPU the stream waits in it,
        not the host. Sums complete in the order in which they began."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (all of one shape) side by side along the last dimension, in rank order."""
        ...

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (all of one shape) along a new first dimension, in rank order."""
        ...

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in `x` itself, on every rank."""
        ...

    def broadcast(self, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank. A follower waits for rank 0 without a limit. Rank 0 waits for the others no
        longer than in any collective. Raises UnreadableMessage for bytes that rank 0 did not send."""
        ...

    def least(self, values: Sequence[int]) -> list[int]:
        """The element-wise minimum over the ranks, which pass equally many values. It is computed on the hosts, without
        waiting for the devices."""
        ...

    def before_close(self, action: Callable[[], None]) -> None:
        """Calls `action` just before the group closes: NCCL waits until the CUDA graphs with its collectives are
        destroyed."""
        ...

    def close(self) -> None: ...


class Solo:
    """A worker of one rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def begin_all_reduce(self, x: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, message: bytes = b"") -> bytes:
        return message

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def before_close(self, action: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


class RankGroup:
    """Two or more ranks: tensors over gloo (CPU) or NCCL (CUDA), messages over gloo on either.

    Made with the same `store` and `name` on every rank; the constructor waits until all have come. `timeout_s` bounds
    that and each collective, but not a follower's wait in `broadcast`. gloo listens at this rank's `host`. `closing` is
    called when the group is closed.

    The end of a rank is noticed at once, with one exception: if gloo was about to write a message when the connection
    closes, it drops the message, and the sender waits for all of `timeout_s`.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        name: str = "tp",
        device: str = "cpu",
        timeout_s: float = 60.0,
        host: str = LOOPBACK,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._before_close: list[Callable[[], None]] = []
        self._store, self._closing = store, closing  # torch keeps its own half of a store alive, but not this one
        self._timeout = timedelta(seconds=timeout_s)
        self._tensors: Any = _process_group(
            PrefixStore(f"{name}/tensors", store), rank, size, device, host, self._timeout
        )
        self._values: Any = _process_group(
            PrefixStore(f"{name}/values", store), rank, size, "cpu", host, timedelta(days=365)
        )
        self._call(self._tensors, "allreduce", [torch.zeros(1, device=device)])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._call(self._tensors, "allreduce", [x])
        return x

    def begin_all_reduce(self, x: torch.Tensor) -> Callable[[], None]:
        return self._begin(self._tensors, "allreduce", [x])

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(tuple(self.collect(x)), dim=-1)

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._call(self._tensors, "_allgather_base", parts, x.contiguous().unsqueeze(0))
        return parts

    def share(self, x: torch.Tensor) -> torch.Tensor:
        self._call(self._tensors, "broadcast", x, 0)
        return x

    def broadcast(self, message: bytes = b"") -> bytes:
        # A step's batch nearly always fits the first part: one round trip.
        if self.rank == 0:
            self._send(message)
            return message
        return self._receive()

    def _send(self, message: bytes) -> None:
        assert len(message) <= MAX_MESSAGE_BYTES, f"a message of {len(message)} bytes for the other ranks"
        first = bytearray(_FIRST_BYTES)
        head = message[: _FIRST_BYTES - _HEADER_BYTES]
        first[:_HEADER_BYTES] = len(message).to_bytes(_HEADER_BYTES, "little")
        first[_HEADER_BYTES : _HEADER_BYTES + len(head)] = head
        self._broadcast(torch.frombuffer(first, dtype=torch.uint8))
        if len(message) > len(head):
            self._broadcast(torch.frombuffer(bytearray(message[len(head) :]), dtype=torch.uint8))

    def _receive(self) -> bytes:
        received = bytearray(_FIRST_BYTES)
        self._broadcast(torch.frombuffer(received, dtype=torch.uint8))
        length = int.from_bytes(received[:_HEADER_BYTES], "little")
        if length > MAX_MESSAGE_BYTES:
            raise UnreadableMessage(
                f"rank {self.rank} of {self.size} got a message of {length} bytes, of {MAX_MESSAGE_BYTES}"
            )
        missing = length - (_FIRST_BYTES - _HEADER_BYTES)
        if missing > 0:
            rest = bytearray(missing)
            self._broadcast(torch.frombuffer(rest, dtype=torch.uint8))
            received += rest
        return bytes(memoryview(received)[_HEADER_BYTES : _HEADER_BYTES + length])

    def _broadcast(self, values: torch.Tensor) -> None:
        options = BroadcastOptions()
        if self.rank == 0:
            options.timeout = self._timeout
        self._call(self._values, "broadcast", [values], options)

    def least(self, values: Sequence[int]) -> list[int]:
        numbers = torch.tensor(values)
        options = AllreduceOptions()
        options.reduceOp, options.timeout = ReduceOp(ReduceOp.MIN), self._timeout
        self._call(self._values, "allreduce", [numbers], options)
        return numbers.tolist()

    def before_close(self, action: Callable[[], None]) -> None:
        self._before_close.append(action)

    def close(self) -> None:
        """Ends the group for every rank: a peer that is in a collective gets WorkerLost."""
        while self._before_close:
            self._before_close.pop()()
        for group in (self._tensors, self._values):
            if group is not None:
                group.abort()
        self._tensors = self._values = None  # gloo disconnects when its group is destroyed, not when it is aborted
        self._closing()

    def _call(self, group: Any, collective: str, *arguments: object) -> None:
        self._begin(group, collective, *arguments)()

    def _begin(self, group: Any, collective: str, *arguments: object) -> Callable[[], None]:
        if group is None:
            raise WorkerLost(f"rank {self.rank} of {self.size} has left its tensor-parallel group")
        with self._losing():
            work = getattr(group, collective)(*arguments)

        def wait() -> None:
            with self._losing():
                work.wait()

        return wait

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WorkerLost(f"rank {self.rank} of {self.size} lost its tensor-parallel group: {error}") from error


def _process_group(store: Store, rank: int, size: int, device: str, host: str, timeout: timedelta) -> Any:
    """Creates a group of gloo or NCCL over the caller's store. Untyped, because a CPU build of torch lacks NCCL's
    class. gloo needs no key and listens at the machine's name by default; ranks of one host listen on the loopback
    only."""
    from torch import distributed

    backends: Any = distributed
    if torch.device(device).type == "cpu":
        options = backends.ProcessGroupGloo._Options()
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return backends.ProcessGroupGloo(store, rank, size, options)
    options = backends.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return backends.ProcessGroupNCCL(store, rank, size, options)
