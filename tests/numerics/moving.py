"""Two workers in one process, between which sequences move and prefixes are pulled: their lanes are queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from decode_pool.decode_role import DecodeRole
from kvtransfer.hashing import chain_hashes
from kvtransfer.transports.inproc import InprocExchange
from prefill_pool.prefill_role import PrefillRole
from protos.values import (
    FinishReason,
    GenerateRequest,
    LaneAddress,
    MoveRequest,
    ReserveRequest,
    SamplingParams,
    ShareRequest,
    Ticket,
)
from tests.numerics.engines import ranks_of
from workers.build_rank import LoadedRank, build_engine, make_transfer
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.parallel.ranks import Leader
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import WorkerConfig


@dataclass
class Worker:
    engine: Engine
    role: DecodeRole | PrefillRole
    address: LaneAddress
    rank: LoadedRank

    def run(self, until: Any) -> list[int]:
        """Steps until an update satisfies it; the tokens up to then."""
        tokens: list[int] = []
        while True:
            for update in self.engine.step(0.0):
                assert update.error is None
                tokens += update.token_ids
                if until(update, tokens):
                    return tokens

    def reserve(self, request_id: str, prompt_ids: tuple[int, ...], source: Worker, num_tokens: int = 0) -> Ticket:
        asked = ReserveRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            num_tokens=num_tokens,
            source=source.address,
            source_layout=source.rank.layout,
        )
        return self.role.reserve(asked, 0.0)


def make_worker(
    rank: LoadedRank, name: str, exchange: InprocExchange, kind: type[DecodeRole] | type[PrefillRole] = DecodeRole
) -> Worker:
    address = LaneAddress(worker_id=name, incarnation=1, host="127.0.0.1", port=0)
    sender, receiver = exchange.sender(address, rank.layout), exchange.receiver(address, rank.layout)
    memory: Any = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=rank.device)  # noqa: E731
    sender.stage = memory  # type: ignore[method-assign]
    leader = Leader(rank.group)
    transfers = TransferLeader(make_transfer(rank, sender=sender, receiver=receiver))
    roles: list[DecodeRole | PrefillRole] = []

    def role_for(pool: BlockPool) -> DecodeRole | PrefillRole:
        roles.append(kind(transfers, pool, rank.layout))
        return roles[0]

    engine = build_engine(rank, leader, role_for, incarnation=1, clock=lambda: 0.0)
    return Worker(engine, roles[0], address, rank)


@contextmanager
def two(config: WorkerConfig, other: WorkerConfig | None = None) -> Iterator[tuple[Worker, Worker]]:
    """Alike, unless `other` is the second one's config."""
    exchange = InprocExchange()
    with ranks_of(config) as (here,), ranks_of(other or config) as (there,):
        yield make_worker(here, "d0", exchange), make_worker(there, "d1", exchange)


@contextmanager
def disaggregated(prefill: WorkerConfig, decode: WorkerConfig) -> Iterator[tuple[Worker, Worker]]:
    exchange = InprocExchange()
    with ranks_of(prefill) as (here,), ranks_of(decode) as (there,):
        yield make_worker(here, "p0", exchange, PrefillRole), make_worker(there, "d0", exchange)


def handed_over(
    first: Worker, then: Worker, prompt: Sequence[int], sampling: SamplingParams, request_id: str = "r"
) -> list[int]:
    """The tokens of a sequence that is handed over after its prompt."""
    prompt_ids = tuple(prompt)
    ticket = then.reserve(request_id, prompt_ids, first)
    request = GenerateRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling, ticket=ticket)
    first.engine.submit(request, 0.0)
    tokens = first.run(lambda update, _: update.finish_reason is FinishReason.PREFILLED)
    while first.engine.scheduler.has_requests():
        first.engine.step(0.0)
    then.engine.submit(replace(request, output_ids=tuple(tokens)), 0.0)
    return tokens + then.run(lambda update, _: update.finish_reason not in (None, FinishReason.PREFILLED))


def moved(old: Worker, new: Worker, prompt: Sequence[int], sampling: SamplingParams, *, num_before: int) -> list[int]:
    """The tokens of a sequence that moves after `num_before` of them."""
    prompt_ids = tuple(prompt)
    old.engine.submit(GenerateRequest(request_id="r", prompt_ids=prompt_ids, sampling=sampling), 0.0)
    tokens = old.run(lambda update, so_far: len(so_far) >= num_before)
    sequence = (*prompt_ids, *tokens)
    ticket = new.reserve("r", sequence[:-1], old, num_tokens=len(sequence) + 30)
    old.engine.migrate(MoveRequest(request_id="r", ticket=ticket), 0.0)
    tokens += old.run(lambda update, _: update.finish_reason is FinishReason.MOVED)
    request = GenerateRequest(
        request_id="r", prompt_ids=prompt_ids, output_ids=tuple(tokens), sampling=sampling, ticket=ticket
    )
    new.engine.submit(request, 0.0)
    return tokens + new.run(lambda update, _: update.finish_reason is FinishReason.LENGTH)


def pulled(old: Worker, new: Worker, prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], int]:
    """The tokens of a prompt whose prefix comes from the other worker, and the length of that prefix."""
    prompt_ids = tuple(prompt)
    old.engine.submit(GenerateRequest(request_id="before", prompt_ids=prompt_ids, sampling=sampling), 0.0)
    old.run(lambda update, _: update.finish_reason is not None)
    size = old.rank.layout.block_size
    shared = prompt_ids[: (len(prompt_ids) - 1) // size * size]
    ticket = new.reserve("r/pull", shared, old)
    asked = ShareRequest(ticket=ticket, hashes=tuple(chain_hashes(shared, size)))
    assert old.engine.share(asked, 0.0) == ticket.stop - min(ticket.starts)
    old.engine.step(0.0)
    new.engine.submit(GenerateRequest(request_id="r", prompt_ids=prompt_ids, sampling=sampling, pull=ticket), 0.0)
    return new.run(lambda update, _: update.finish_reason is not None), len(shared)
