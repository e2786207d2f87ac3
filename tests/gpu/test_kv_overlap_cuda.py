"""KV of a chunk travels while the next one is computed, and a profile shows it: a prompt is read on a GPU in chunks and
pushed over a real lane to another worker on the same card, which writes the answer. Left out where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from decode_pool.decode_role import DecodeRole
from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transports.collective.collective import CollectiveTransport
from prefill_pool.prefill_role import PrefillRole
from protos.values import FinishReason, GenerateRequest, LaneAddress, ReserveRequest, Span
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import GREEDY, answer, colocated, ranks_of
from workers.build_rank import LoadedRank, build_engine, make_transfer
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.parallel.ranks import Leader
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.gpu

DEVICE: Literal["cpu", "cuda"] = "cuda"
PROMPT = tuple(torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(5)).tolist())
PATIENCE_S = 60.0


class Worker:
    """Over the network, as one card and one process allow: on a GPU through pinned memory of the host."""

    def __init__(self, rank: LoadedRank, name: str, make_role: Callable[[TransferLeader, BlockPool], Any]) -> None:
        self.layout = rank.layout
        config = LaneConfig(transport="collective")
        made = CollectiveTransport(device="cuda:0" if DEVICE == "cuda" else "cpu", config=config)
        address = LaneAddress(worker_id=name, incarnation=1, host="127.0.0.1", port=0)
        receiver = made.receiver(address, rank.layout)
        self.address = receiver.address
        leader = Leader(rank.group)
        self.transfers = TransferLeader(
            make_transfer(rank, sender=made.sender(address, rank.layout), receiver=receiver)
        )
        self.roles: list[Any] = []

        def role_for(pool: BlockPool) -> Any:
            self.roles.append(make_role(self.transfers, pool))
            return self.roles[0]

        self.engine: Engine = build_engine(rank, leader, role_for, incarnation=1, clock=time.monotonic)
        self.transfers.record(self.engine.timeline)
        self.tokens: list[int] = []
        self.ended: FinishReason | None = None
        self.spans: list[Span] = []

    def step(self) -> None:
        if self.engine.timeline.recording:  # looking again and again makes more spans than a timeline keeps
            self.spans += self.engine.timeline.record(True)[0]
        for update in self.engine.step(time.monotonic()):
            assert update.error is None
            self.tokens += update.token_ids
            self.ended = update.finish_reason or self.ended


def until(happened: Callable[[], bool], *workers: Worker) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s, "it did not happen"
        for worker in workers:
            worker.step()


def beside(one: Span, other: Span) -> bool:
    return one.start_s < other.start_s + other.duration_s and other.start_s < one.start_s + one.duration_s


def test_a_chunk_travels_while_the_next_one_is_computed(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = WorkerConfig(model=str(tmp_path), device=DEVICE, dtype="float32", num_blocks=64, prefill_chunk=32)
    with colocated(settings) as engine:
        (expected,) = answer(engine, [PROMPT])
    with ExitStack() as opened:
        (here,), (there,) = (opened.enter_context(ranks_of(settings)) for _ in range(2))
        reader = Worker(here, "p0", lambda transfers, pool: PrefillRole(transfers, pool, here.layout))
        writer = Worker(there, "d0", lambda transfers, pool: DecodeRole(transfers, pool, there.layout))
        opened.callback(reader.transfers.close)
        opened.callback(writer.transfers.close)
        for name in ("warm", "r"):
            reader.engine.pool.clear()
            writer.engine.pool.clear()
            reader.tokens, writer.tokens, reader.ended, writer.ended = [], [], None, None
            asked = ReserveRequest(
                request_id=name,
                prompt_ids=PROMPT,
                source=reader.address,
                source_layout=reader.layout,
                lease_s=PATIENCE_S,
            )
            ticket = writer.roles[0].reserve(asked, time.monotonic())
            reader.transfers.open(ticket)
            until(lambda: [lane.state for lane in reader.transfers.lanes()] == ["open"], reader, writer)
            reader.engine.timeline.record(True)
            request = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=GREEDY, ticket=ticket)
            reader.engine.submit(request, time.monotonic())
            until(lambda: reader.ended is FinishReason.PREFILLED and not reader.engine.has_work(), reader, writer)
            spans = reader.spans + list(reader.engine.timeline.record(False)[0])
            reader.spans = []
            answered = GenerateRequest(
                request_id=name, prompt_ids=PROMPT, output_ids=tuple(reader.tokens), sampling=GREEDY, ticket=ticket
            )
            writer.engine.submit(answered, time.monotonic())
            until(lambda: writer.ended is not None and not writer.engine.has_work(), writer)
        assert reader.tokens + writer.tokens == expected.token_ids
        steps = [span for span in spans if span.name == "device"]
        sends = [span for span in spans if span.name == "KV send"]
        assert len(steps) == 4
        assert sum(span.kv.num_bytes for span in sends if span.kv is not None) == len(ticket.block_ids) * (
            ticket.layout.block_bytes
        )
        assert any(beside(send, step) for send in sends for step in steps[1:]), "nothing travelled beside a step"
