"""One worker of a pair, around a model one can compute by hand, with real lanes: here, or in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from decode_pool.decode_role import DecodeRole
from kvtransfer.hashing import chain_hashes
from kvtransfer.lane_rules import LaneConfig
from kvtransfer.reshard import Cut
from kvtransfer.ticket_ledger import TicketState
from kvtransfer.transports.collective.collective import CollectiveTransport
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
from tests.cluster.forked import FORKS
from tests.unit.decode_pool.pair import DECODE, DECODE_WEIGHT, LAYOUT, PREFILL, PREFILL_WEIGHT, SIZE, Side
from tests.unit.workers.toy import ToyRunner
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig

NUM_BLOCKS = 16
LEASE_S = 60.0
"""Longer than any test: what is freed in time was not freed by a lease."""
PATIENCE_S = 30.0


class Tensors:
    """The toy's cache, as lanes want it."""

    def __init__(self, runner: ToyRunner) -> None:
        self._runner = runner

    def read(self, cut: Cut, stage: Callable[[int], Any]) -> torch.Tensor:
        content = torch.from_numpy(self._runner.read(cut, stage)).reshape(-1)
        payload: torch.Tensor = stage(content.nbytes).view(torch.int64)
        return payload.copy_(content)

    def write(self, cut: Cut, payload: torch.Tensor) -> None:
        self._runner.write(cut, payload.numpy())


class Half:
    """Everything but gRPC, stepped by hand. Prompts are read a block a step."""

    def __init__(self, pool: str, lanes: LaneConfig) -> None:
        made = CollectiveTransport(config=lanes)
        who, weight = (PREFILL, PREFILL_WEIGHT) if pool == "prefill" else (DECODE, DECODE_WEIGHT)
        self.sender, self.receiver = made.sender(who, LAYOUT), made.receiver(who, LAYOUT)
        self.side = Side(weight, NUM_BLOCKS, self._role if pool == "decode" else self._prefill_role, prefill_chunk=SIZE)

    def reserve(
        self, request_id: str, prompt_ids: tuple[int, ...], source: LaneAddress = PREFILL, num_tokens: int = 0
    ) -> Ticket:
        request = ReserveRequest(
            request_id=request_id, prompt_ids=prompt_ids, lease_s=LEASE_S, source=source, source_layout=LAYOUT,
            num_tokens=num_tokens,
        )  # fmt: skip
        return self.role.reserve(request, time.monotonic())

    def share(self, ticket: Ticket, prompt_ids: tuple[int, ...]) -> int:
        asked = ShareRequest(ticket=ticket, hashes=tuple(chain_hashes(prompt_ids, SIZE)))
        return self.side.engine.share(asked, time.monotonic())

    def move(self, request_id: str, ticket: Ticket) -> None:
        self.side.engine.migrate(MoveRequest(request_id=request_id, ticket=ticket), time.monotonic())

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return self.side.tokens[request_id]

    def has_moved(self, request_id: str) -> bool:
        return self.side.ended.get(request_id) is FinishReason.MOVED

    def open(self, ticket: Ticket) -> None:
        self.transfers.open(ticket)

    def submit(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...] = (),
        ticket: Ticket | None = None,
        pull: Ticket | None = None,
    ) -> None:
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=6),
            ticket=ticket,
            pull=pull,
        )
        self.side.engine.submit(request, time.monotonic())

    def step(self) -> None:
        self.side.step(time.monotonic())
        self.side.engine.check_integrity((*self.role.ledger.reserved_ids(), *self.role.outgoing.shared_ids()))

    def state(self, ticket_id: str) -> TicketState | None:
        return self.role.ledger.state(ticket_id, 1)

    def lanes(self) -> Sequence[str]:
        return [lane.state for lane in self.transfers.lanes()]

    def assert_idle(self) -> None:
        """No request, no ticket, no block, and no staging memory in use, once no lane is opened in vain any more."""
        until(lambda: self.step() or not self.side.engine.has_work())
        self.role.ledger.assert_idle()
        self.side.engine.assert_idle()
        assert self.side.pool.num_free == NUM_BLOCKS
        for end in (self.sender, self.receiver):
            assert not end._staging._taken, "a payload is left in staging"

    def close(self) -> None:
        self.transfers.close()

    def _prefill_role(self, side: Side) -> PrefillRole:
        config = TransferConfig(chunk_bytes=LAYOUT.block_bytes)
        self.role: PrefillRole | DecodeRole = PrefillRole(self._transfers(side), side.pool, LAYOUT, config)
        return self.role

    def _role(self, side: Side) -> DecodeRole:
        self.role = DecodeRole(self._transfers(side), side.pool, LAYOUT)
        return self.role

    def _transfers(self, side: Side) -> TransferLeader:
        transfer = RankTransfer(Tensors(side.runner), LAYOUT, sender=self.sender, receiver=self.receiver)
        self.transfers = TransferLeader(transfer)
        return self.transfers


class Distant:
    """A half in another process; what is called here happens there."""

    def __init__(self, pool: str, lanes: LaneConfig) -> None:
        self._pipe, there = FORKS.Pipe()
        self._process = FORKS.Process(target=_serve, args=(there, pool, lanes), daemon=True)
        self._process.start()
        there.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            assert self._pipe.poll(PATIENCE_S), f"the other process does not answer {name}"
            return self._pipe.recv()

        return call

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _serve(pipe: Connection, pool: str, lanes: LaneConfig) -> None:
    torch.set_num_threads(1)
    half = Half(pool, lanes)
    while True:
        name, arguments = pipe.recv()
        pipe.send(getattr(half, name)(*arguments))


def until(happened: Callable[[], bool]) -> None:
    """Lanes have threads of their own, and halves no bell: looks again and again."""
    for _ in range(int(PATIENCE_S / 0.002)):
        if happened():
            return
        threading.Event().wait(0.002)
    raise AssertionError("it did not happen")
