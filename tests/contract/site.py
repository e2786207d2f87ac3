"""Where the ends of one kind of transport meet, in one process, and what they send each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transport import Chunk, Receiver, Sender
from kvtransfer.transports.collective.collective import CollectiveTransport
from kvtransfer.transports.inproc import InprocExchange
from protos.values import KVLayout, LaneAddress, Ticket

LAYOUT = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
BLOCK_BYTES = LAYOUT.block_bytes
PATIENCE_S = 30.0

KINDS = ["inproc", "shm", "collective"]
WIRED = [name for name in KINDS if name != "inproc"]
"""Transports of lanes that have threads and wires."""


def address(worker_id: str, incarnation: int = 1) -> LaneAddress:
    return LaneAddress(worker_id=worker_id, incarnation=incarnation, host="127.0.0.1", port=0)


class Site:
    """A place where ends of one kind of transport meet, with a bell that rings whenever one has something to say."""

    def __init__(self, kind: str, config: LaneConfig) -> None:
        self._exchange: Any = InprocExchange(max_staged_bytes=config.max_staged_bytes) if kind == "inproc" else None
        over: Any = "auto" if kind == "inproc" else kind
        self._config = replace(config, transport=over)
        self._bell = threading.Condition()
        self._ends: list[Any] = []

    def sender(self, who: LaneAddress, *, rank: int = 0, layout: KVLayout = LAYOUT) -> Sender[Any]:
        end: Sender[Any] = self._keep(self._transport(rank).sender(who, layout, wake=self._ring))
        return end

    def receiver(self, who: LaneAddress, *, rank: int = 0, layout: KVLayout = LAYOUT) -> Receiver[Any]:
        end: Receiver[Any] = self._keep(self._transport(rank).receiver(who, layout, wake=self._ring))
        return end

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def events(self, end: Sender[Any] | Receiver[Any], wanted: int) -> list[Any]:
        """The next `wanted` events of an end."""
        collected: list[Any] = []

        def enough() -> bool:
            collected.extend(end.poll())
            return len(collected) >= wanted

        self.until(enough)
        return collected

    def until(self, happened: Callable[[], bool]) -> None:
        with self._bell:
            assert self._bell.wait_for(happened, PATIENCE_S), "it did not happen"

    def _transport(self, rank: int) -> Any:
        return self._exchange or CollectiveTransport(rank=rank, config=self._config)

    def _keep(self, end: Any) -> Any:
        self._ends.append(end)
        return end

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()


def ticket_for(receiver: Receiver[Any], num_blocks: int = 8, ticket_id: str = "r1") -> Ticket:
    return Ticket(
        ticket_id=ticket_id,
        generation=1,
        lease_s=30.0,
        block_ids=tuple(range(num_blocks)),
        num_cached_tokens=0,
        layout=LAYOUT,
        destination=receiver.address,
    )


def chunk_of(ticket: Ticket, first_block: int, num_blocks: int = 1) -> Chunk:
    return Chunk(
        ticket_id=ticket.ticket_id, generation=ticket.generation, first_block=first_block, num_blocks=num_blocks
    )


def kv(num_blocks: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[layers, 2, blocks, heads, block size, head dim], flat."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * 2 * num_blocks * 2 * 4 * 4, generator=generator).to(dtype)


def one_head(seed: int) -> torch.Tensor:
    return kv(seed=seed)[: BLOCK_BYTES // 2 // 4]


def meet(site: Site) -> tuple[Sender[Any], Receiver[Any], Ticket]:
    sender, receiver = site.sender(address("p0")), site.receiver(address("d0"))
    receiver.expect(sender.address, LAYOUT)
    return sender, receiver, ticket_for(receiver)


def push(site: Site, sender: Sender[Any], ticket: Ticket, chunks: Sequence[tuple[Chunk, torch.Tensor]]) -> None:
    for chunk, payload in chunks:
        site.until(lambda: sender.can_offer(ticket))
        sender.offer(ticket, chunk, payload.clone())
