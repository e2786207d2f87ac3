"""The decisions that a pool makes for its engine. The engine does not know its pool.

The engine calls `tick` once at the head of every step, from its thread, also when nothing runs. A role that moves KV
does its work there: it reads and writes the engine's blocks between two launches. A step in flight writes only
positions beyond `num_computed` of its requests, and reads only blocks that they hold. So the role may read computed
positions, and write reserved blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypedDict

from protos.errors import BatonError, InvalidRequest
from protos.values import BlockHash, GenerateRequest, LaneLoad, Ticket
from workers.batch import Batch
from workers.scheduling.request import Onload, Request


class Disposition(Enum):
    """The disposition of a request whose prompt was computed and whose first token was sampled."""

    KEEP = auto()  # continue decoding here
    HOLD = auto()  # finish it for the client ("prefilled"), keep its blocks until `tick` releases it
    RELEASE = auto()  # finish it for the client ("prefilled"), free its blocks now


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Outcomes of transfers, by request id. Unknown ids are ignored.

    - `moved`: running requests that continue on another worker, and are HELD from now on;
    - `stayed`: requests that could not be migrated, and continue here;
    - `released`: held requests whose blocks may be freed;
    - `failed`: requests that cannot continue, and whose blocks are freed.

    `Role.drop` is not called for `released` and `failed`.
    """

    moved: Sequence[str] = ()
    stayed: Sequence[tuple[str, BatonError]] = ()
    released: Sequence[str] = ()
    failed: Sequence[tuple[str, BatonError]] = ()


class TransferLoad(TypedDict, total=False):
    """The fields of a `WorkerLoad` about tickets and transfers."""

    num_tickets: int
    transfer_bytes: int
    transfer_s: float
    transfer_hidden_s: float
    num_pulled_tokens: int
    num_failed_pulls: int
    num_moved: int
    lanes: tuple[LaneLoad, ...]


class Role:
    """This one serves prefill and decode in one process, without transfers."""

    def has_reservation(self, request: GenerateRequest) -> bool:
        """True if blocks are reserved for this request, which is not submitted yet."""
        return False

    def admissible(self, request: Request, now: float) -> bool:
        """Whether this waiting request may enter the batch. It is called for every waiting request in every step, so it
        must be cheap.

        A decode role returns True once the request's ticket has arrived, and gives the ticket's blocks to the request
        then (`request.block_ids`, `num_computed`, `num_cached`, `adopted = True`). Not called again for a request that
        has adopted blocks, nor for one that was preempted: that one recomputes its KV here.
        """
        return True

    def after_prefill(self, request: Request) -> Disposition:
        """Returns the disposition of a request. Called once, with the first token that this engine sampled, unless that
        token ended the request."""
        return Disposition.KEEP

    def migrate(self, request: Request, ticket: Ticket, now: float) -> None:
        """Begins to migrate the request to the ticket's worker. A later `tick` returns it as moved or stayed. Raises
        InvalidRequest on a worker without lanes."""
        raise InvalidRequest("this worker has no lanes and cannot migrate a request: let it end here", param="ticket")

    def share(self, ticket: Ticket, hashes: Sequence[BlockHash], now: float, coming: Onload | None) -> int:
        """Pushes cached blocks to the ticket, and returns their number: blocks of the chain `hashes` that the ticket
        has, and that are on the device or `coming` from the host. Raises InvalidRequest or IncompatibleWorkers."""
        raise InvalidRequest("this worker has no lanes: pull the blocks from another worker", param="ticket")

    def drop(self, request: Request) -> None:
        """Stops the transfers of a request that was aborted or has ended. The engine frees its blocks right after this
        returns, unless it is HELD: then `tick` releases it once no transfer reads them. May be called for unknown
        requests, and more than once."""

    def withdraw(self, request_id: str) -> bool:
        """Frees the reservation of a request that was aborted before it was submitted. False if there was none."""
        return False

    def tick(self, now: float, num_in_flight: int) -> Tick:
        """Advances all transfers and returns their outcomes. The steps in flight write no computed position."""
        return Tick()

    def is_behind(self) -> bool:
        return False

    def advance_transfers(self, now: float, num_in_flight: int) -> None:
        """Pushes KV computed before the step that the engine waits for. The next `tick` returns the results."""

    def launching(self, batch: Batch, now: float) -> None:
        """Called before the batch is launched. A role that moves KV may arm pushes for when its layers are computed."""

    def busy(self) -> bool:
        return False

    def load(self) -> TransferLoad:
        return {}
