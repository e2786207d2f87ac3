"""The operations that every rank of a worker does, in the same order, and the types of their messages. Pure.

Rank 0 calls a method of one of these Protocols; its followers call the same method of their own part with the same
arguments (`workers.parallel.ranks`). The methods return nothing, so followers have nothing to report.
"""

from __future__ import annotations

from typing import Any, Protocol, get_type_hints

from kvtransfer.transport import Chunk
from protos.codec import Messages
from protos.values import KVLayout, LaneAddress, Ticket
from workers.batch import Batch, Sample

BlockIds = tuple[int, ...]


class StepOperations(Protocol):
    """Operations of the runner (`workers.batch.Pipeline`)."""

    def launch(self, batch: Batch) -> Any: ...


class CopyOperations(Protocol):
    """Operations of the host tier (`workers.kv.host.HostCopies`)."""

    def offload(self, block_ids: BlockIds, slots: BlockIds) -> None: ...
    def onload(self, load_id: int, slots: BlockIds, block_ids: BlockIds) -> None: ...
    def await_copy(self, load_id: int) -> None: ...


class AdapterOperations(Protocol):
    """Operations of the adapters (`workers.adapters.linear.AdapterTable`)."""

    def load_adapter(self, path: str, adapter_id: str) -> Any: ...
    def unload_adapter(self, adapter_id: str) -> None: ...


class TransferOperations(Protocol):
    """Operations of the lanes (`workers.transfer.rank_transfer.RankTransfer`)."""

    def open(self, ticket: Ticket) -> None: ...
    def push(self, ticket: Ticket, chunk: Chunk, block_ids: BlockIds, num_in_flight: int | None) -> None: ...
    def arm(self, ticket: Ticket, chunk: Chunk, block_ids: BlockIds) -> None: ...
    def look(self, chunks: tuple[Chunk, ...]) -> Any: ...
    def land(self, chunk: Chunk, block_ids: BlockIds, source: str) -> None: ...
    def drop(self, chunk: Chunk, source: str) -> None: ...
    def drop_source(self, source: str, kept: tuple[Chunk, ...]) -> None: ...
    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None: ...
    def cancel(self, ticket_id: str) -> None: ...
    def close_lane_to(self, peer: str) -> None: ...
    def close_lane_from(self, peer: str) -> None: ...


class DraftOperations(Protocol):
    """Operations of proposers that compute with a model (`workers.speculation.ranks`)."""

    def draft(self, batch: Batch) -> Any: ...
    def head_computed(self, batch: Batch, first_hidden: tuple[int, ...]) -> Any: ...
    def head_next(self, batch: Batch) -> Any: ...
    def medusa(self, places: tuple[int, ...], samples: tuple[tuple[Sample, ...], ...]) -> Any: ...


class RankOperations(StepOperations, CopyOperations, AdapterOperations, TransferOperations, DraftOperations, Protocol):
    """All operations of a rank."""


def operations_of(protocol: type) -> dict[str, Any]:
    operations: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        for name, method in vars(base).items():
            if not name.startswith("_") and callable(method):
                hints = get_type_hints(method)
                del hints["return"]
                operations[name] = tuple.__class_getitem__(tuple(hints.values()))
    return operations


STOP = "stop"
LANE_ADDRESS = "lane_address"
MESSAGES = Messages({STOP: tuple[()], LANE_ADDRESS: tuple[LaneAddress], **operations_of(RankOperations)})
"""The messages that rank 0 sends to the other ranks, with the types of the arguments. Followers read no others."""
