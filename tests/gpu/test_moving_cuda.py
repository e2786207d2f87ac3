"""A sequence moves, and a prefix is pulled, between two workers on a GPU: the tokens are those of one that stayed.

Lanes are queues here, for one process has both workers. Left out where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from decode_pool.role import DecodeRole
from kvtransfer.hashing import chain_hashes
from kvtransfer.transports.inproc import InprocExchange
from protos.values import FinishReason, GenerateRequest, LaneAddress, MoveRequest, ReserveRequest, ShareRequest, Ticket
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import GREEDY, answer, colocated, ranks_of
from workers.build import LoadedRank, build_engine, make_transfer
from workers.config import WorkerConfig
from workers.engine.engine import Engine
from workers.kv.blocks import BlockPool
from workers.parallel.ranks import Leader
from workers.transfer.transfer_leader import TransferLeader

pytestmark = pytest.mark.gpu

DEVICE: Literal["cpu", "cuda"] = "cuda"
PROMPT = tuple(torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(5)).tolist())
NUM_BEFORE = 20


@dataclass
class Worker:
    engine: Engine
    role: DecodeRole
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


def make_worker(rank: LoadedRank, name: str, exchange: InprocExchange) -> Worker:
    address = LaneAddress(worker_id=name, incarnation=1, host="127.0.0.1", port=0)
    sender, receiver = exchange.sender(address, rank.layout), exchange.receiver(address, rank.layout)
    memory: Any = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)  # noqa: E731
    sender.stage = memory  # type: ignore[method-assign]
    leader = Leader(rank.group)
    transfers = TransferLeader(make_transfer(rank, sender=sender, receiver=receiver))
    roles: list[DecodeRole] = []

    def role_for(pool: BlockPool) -> DecodeRole:
        roles.append(DecodeRole(transfers, pool, rank.layout))
        return roles[0]

    engine = build_engine(rank, leader, role_for, incarnation=1, clock=lambda: 0.0)
    return Worker(engine, roles[0], address, rank)


@contextmanager
def two(config: WorkerConfig) -> Iterator[tuple[Worker, Worker]]:
    exchange = InprocExchange()
    with ranks_of(config) as (here,), ranks_of(config) as (there,):
        yield make_worker(here, "d0", exchange), make_worker(there, "d1", exchange)


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    make_checkpoint("llama", tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = False
    return WorkerConfig(model=str(tmp_path), device=DEVICE, dtype="float32", num_blocks=64)


def test_a_sequence_that_moves_goes_on_as_it_would_have(config: WorkerConfig) -> None:
    with colocated(config) as engine:
        (expected,) = answer(engine, [PROMPT])
    with two(config) as (old, new):
        request = GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=GREEDY)
        old.engine.submit(request, 0.0)
        tokens = old.run(lambda update, so_far: len(so_far) >= NUM_BEFORE)
        known = (*PROMPT, *tokens)
        ticket = new.reserve("r", known[:-1], old, num_tokens=len(known) + 30)
        old.engine.migrate(MoveRequest(request_id="r", ticket=ticket), 0.0)
        tokens += old.run(lambda update, _: update.finish_reason is FinishReason.MOVED)
        moved = GenerateRequest(
            request_id="r", prompt_ids=PROMPT, output_ids=tuple(tokens), sampling=GREEDY, ticket=ticket
        )
        new.engine.submit(moved, 0.0)
        tokens += new.run(lambda update, _: update.finish_reason is FinishReason.LENGTH)
        assert tokens == expected.token_ids
        assert old.engine.load().num_moved == 1


def test_a_pulled_prefix_is_as_good_as_a_computed_one(config: WorkerConfig) -> None:
    with colocated(config) as engine:
        (expected,) = answer(engine, [PROMPT])
    with two(config) as (old, new):
        old.engine.submit(GenerateRequest(request_id="before", prompt_ids=PROMPT, sampling=GREEDY), 0.0)
        old.run(lambda update, _: update.finish_reason is not None)
        size = old.rank.layout.block_size
        shared = PROMPT[: (len(PROMPT) - 1) // size * size]
        ticket = new.reserve("r/pull", shared, old)
        asked = ShareRequest(ticket=ticket, hashes=tuple(chain_hashes(shared, size)))
        assert old.engine.share(asked, 0.0) == len(shared) // size
        old.engine.step(0.0)
        request = GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=GREEDY, pull=ticket)
        new.engine.submit(request, 0.0)
        assert new.run(lambda update, _: update.finish_reason is not None) == expected.token_ids
        assert new.engine.load().num_pulled_tokens == len(shared)
