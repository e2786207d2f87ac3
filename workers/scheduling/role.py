"""What a pool decides for its engine. The engine asks; it never knows which pool it serves.

``tick`` is called once at the head of every step, from the engine's thread, also when nothing runs. A role that moves
KV does its work there: it reads and writes the engine's blocks between two launches. A step may be in flight then: it
writes only positions beyond `num_computed` of requests it computes, and reads only blocks that they hold. So what is
computed may be read, and blocks that were reserved may be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypedDict

from protos.errors import BatonError, InvalidRequest
from protos.values import BlockHash, GenerateRequest, LaneLoad, Ticket
from workers.batch import Batch
from workers.scheduling.host_loads import Load
from workers.scheduling.request import Request


class Disposition(Enum):
    """What happens to a request whose prompt has just been read and whose first token has just been sampled."""

    KEEP = auto()  # go on decoding here
    HOLD = auto()  # finish it for the client ("prefilled"), keep its blocks until `tick` releases it
    RELEASE = auto()  # finish it for the client ("prefilled"), free its blocks now


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """`moved`: running requests that go on elsewhere, and are HELD from now on. `stayed`: those that were to move and
    cannot; they go on here. `released`: held requests whose blocks may go now. `failed`: requests that cannot go on;
    their blocks go too.

    The role has let go of the last two already: `forget` is not called for them. Ids the engine does not know are
    ignored.
    """

    moved: Sequence[str] = ()
    stayed: Sequence[tuple[str, BatonError]] = ()
    released: Sequence[str] = ()
    failed: Sequence[tuple[str, BatonError]] = ()


class Moving(TypedDict, total=False):
    """Of a `WorkerLoad`: its tickets and transfers."""

    num_tickets: int
    transfer_bytes: int
    transfer_s: float
    transfer_hidden_s: float
    num_pulled_tokens: int
    num_failed_pulls: int
    num_moved: int
    lanes: tuple[LaneLoad, ...]


class Role(Protocol):
    def promised(self, request: GenerateRequest) -> bool:
        """Are blocks reserved here for a request that has not come yet?"""
        ...

    def admissible(self, request: Request, now: float) -> bool:
        """May this waiting request enter the batch? Called for every waiting request, every step; must be cheap.

        A decode role answers True once the request's ticket has arrived, and hands the ticket's blocks to the
        request then (`request.block_ids`, `num_computed`, `num_cached`, `adopted = True`). It is not asked again for
        a request that has adopted blocks, nor for one that was preempted: that one recomputes what it lost, here.
        """
        ...

    def after_prefill(self, request: Request) -> Disposition:
        """Called once, with the first token this engine sampled for the request, unless it ended the request."""
        ...

    def move(self, request: Request, ticket: Ticket, now: float) -> None:
        """The request is to go on where the ticket is. A later `tick` says that it has moved, or has stayed. Raises
        InvalidRequest on a worker without lanes."""
        ...

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float, coming: Load | None) -> int:
        """Pushes cached blocks to the ticket: those of the chain `hashes` that are among its blocks and are here, or
        are `coming` from the host. How many they are. Raises InvalidRequest or IncompatibleWorkers."""
        ...

    def forget(self, request: Request) -> None:
        """The request was aborted or has ended: stop whatever still moves for it. Its blocks are freed by the
        engine right after this returns, unless it is HELD: then `tick` releases it once nothing reads them. May be
        called for requests the role never saw, and more than once."""
        ...

    def withdraw(self, request_id: str) -> bool:
        """A request the engine does not know was aborted: gives back what was reserved for it. Was there anything?"""
        ...

    def tick(self, now: float, num_in_flight: int) -> Tick:
        """What has come of all that moves, and is to move on now. Steps in flight, of which there are so many, write
        nothing that has been computed."""
        ...

    def is_behind(self) -> bool:
        """Would `go_on` have something to move, now or soon?"""
        ...

    def go_on(self, now: float, num_in_flight: int) -> None:
        """While the engine waits for a step that its device computes: moves on what had been computed before it. The
        next `tick` tells what comes of it."""
        ...

    def launching(self, batch: Batch, now: float) -> None:
        """The batch is launched next. A role that moves KV may have it watched while it is computed."""
        ...

    def busy(self) -> bool:
        """Is anything moving, so that the loop must keep ticking although nothing runs?"""
        ...

    def load(self) -> Moving:
        """Of the worker's load, what only the role knows of."""
        ...


class Colocated:
    """Serves prefill and decode in one process: nothing moves, everything stays."""

    def promised(self, request: GenerateRequest) -> bool:
        return False

    def admissible(self, request: Request, now: float) -> bool:
        return True

    def after_prefill(self, request: Request) -> Disposition:
        return Disposition.KEEP

    def move(self, request: Request, ticket: Ticket, now: float) -> None:
        raise InvalidRequest("this worker has no lanes: what runs here ends here", param="ticket")

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float, coming: Load | None) -> int:
        raise InvalidRequest("this worker has no lanes: it can push nothing", param="ticket")

    def forget(self, request: Request) -> None:
        pass

    def withdraw(self, request_id: str) -> bool:
        return False

    def tick(self, now: float, num_in_flight: int) -> Tick:
        return Tick()

    def is_behind(self) -> bool:
        return False

    def go_on(self, now: float, num_in_flight: int) -> None:
        pass

    def launching(self, batch: Batch, now: float) -> None:
        pass

    def busy(self) -> bool:
        return False

    def load(self) -> Moving:
        return {}
