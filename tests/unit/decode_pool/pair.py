"""A prefill and a decode worker of toy models, with a post between them that a test can hold up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decode_pool.decode_role import DecodeRole
from kvtransfer.events import EventLog
from kvtransfer.transports.inproc import InprocExchange, InprocParcel
from prefill_pool.prefill_role import PrefillRole
from protos.values import (
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    KVLayout,
    LaneAddress,
    ReserveRequest,
    SamplingParams,
    Ticket,
)
from tests.unit.workers.harness import ToyCopies
from tests.unit.workers.sync_pipeline import SyncPipeline
from tests.unit.workers.toy import ToyRunner, toy_tokens
from workers.batch import Batch, PendingStep, RowLimits, StepOutput
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.kv.host import HostPool
from workers.scheduling.role import Role
from workers.scheduling.scheduler import Scheduler
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import SchedulerConfig, TransferConfig

SIZE = 4
VOCAB = 997
PREFILL_WEIGHT = 3
DECODE_WEIGHT = 5
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, block_size=SIZE, dtype="float32", device="cpu")
BLOCK_BYTES = SIZE * 8  # of a toy payload
PREFILL = LaneAddress(worker_id="p0", incarnation=1, host="127.0.0.1", port=0)
DECODE = LaneAddress(worker_id="d0", incarnation=1, host="127.0.0.1", port=0)
LEASE_S = 50.0
NUM_ANSWER = 6


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 131 + 17 * index * index) % VOCAB for index in range(length))


def expected(prompt_ids: tuple[int, ...], num_tokens: int = NUM_ANSWER) -> tuple[int, ...]:
    """The first token with the prefill worker's signature, the others with the decode worker's."""
    return toy_tokens(prompt_ids, num_tokens, weight=DECODE_WEIGHT, first_weight=PREFILL_WEIGHT, vocab_size=VOCAB)


class Post:
    """Delivers at once, or keeps everything until it is told to; may spoil what it carries."""

    def __init__(self) -> None:
        self.holding = False
        self.kept: list[Callable[[], None]] = []
        self.num_carried = 0
        self.spoil: Callable[[InprocParcel], None] | None = None

    def __call__(self, parcel: InprocParcel, deliver: Callable[[], None]) -> None:
        self.num_carried += 1
        if self.spoil is not None:
            self.spoil(parcel)
        if self.holding:
            self.kept.append(deliver)
        else:
            deliver()

    def deliver(self, count: int | None = None) -> None:
        """The oldest `count`, or all."""
        now, self.kept = self.kept[:count], self.kept[count:] if count is not None else []
        for deliver in now:
            deliver()


class _Aside:
    """A pipeline whose steps are over when `looked` says so, though all is computed at once."""

    def __init__(self, runner: ToyRunner, looked: Callable[[], bool]) -> None:
        self._in_turn = SyncPipeline(runner)
        self._looked = looked

    @property
    def row_limits(self) -> RowLimits:
        return self._in_turn.row_limits

    def launch(self, batch: Batch) -> _UnderWay:
        return _UnderWay(self._in_turn.launch(batch), self._looked)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    done: PendingStep
    is_over: Callable[[], bool]

    def fetch(self) -> StepOutput:
        return self.done.fetch()


class Side:
    """One worker: everything but the network and the thread. `host_slots`: blocks that its host keeps. Where there is
    `looked`, a device computes its steps, and that says whether the one under way is over."""

    def __init__(
        self,
        weight: int,
        num_blocks: int,
        make_role: Callable[[Side], Role],
        *,
        depth: int = 0,
        host_slots: int = 0,
        looked: Callable[[], bool] | None = None,
        **config: Any,
    ) -> None:
        log = EventLog(incarnation=1)
        self.runner = ToyRunner(weight, SIZE, VOCAB)
        self.copies = ToyCopies(self.runner)
        host = HostPool(host_slots, self.copies, log.record, block_bytes=BLOCK_BYTES) if host_slots else None
        self.pool = BlockPool(num_blocks, SIZE, log.record, host=host)
        role = make_role(self)
        settings = SchedulerConfig(**({"max_model_len": 1000, "vocab_size": VOCAB, "time_slice_s": math.inf} | config))
        self.scheduler = Scheduler(settings, self.pool, role)
        runner = SyncPipeline(self.runner) if looked is None else _Aside(self.runner, looked)
        self.engine = Engine(self.scheduler, runner, events=log, clock=lambda: 0.0, depth=depth)
        self.tokens: dict[str, tuple[int, ...]] = defaultdict(tuple)
        self.ended: dict[str, FinishReason] = {}
        self.errors: dict[str, ErrorInfo] = {}
        self.cached: dict[str, int] = {}

    def step(self, now: float) -> None:
        for update in self.engine.step(now):
            if update.token_ids and not self.tokens[update.request_id]:
                self.cached[update.request_id] = update.num_cached_tokens
            self.tokens[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.finish_reason
            if update.error is not None:
                self.errors[update.request_id] = update.error


class Pair:
    """`step` is one step of both, a second later. What a gateway would do, tests do by `reserve`, `read`, `answer`."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        decode_blocks: int | None = None,
        staged_blocks: int = 1000,
        chunk_blocks: int = 2,
        headroom: float = 0.0,
        follows_layers: bool = False,
        depth: int = 0,
        looked: Callable[[], bool] | None = None,
        **config: Any,
    ) -> None:
        self.follows_layers = follows_layers
        self.post = Post()
        self.exchange = InprocExchange(self.post, max_staged_bytes=staged_blocks * BLOCK_BYTES)
        self.now = 0.0

        chunk_bytes = chunk_blocks * LAYOUT.block_bytes

        def prefill_role(side: Side) -> PrefillRole:
            return PrefillRole(
                self.transfers(side, PREFILL), side.pool, LAYOUT, TransferConfig(chunk_bytes=chunk_bytes)
            )

        def decode_role(side: Side) -> DecodeRole:
            config = TransferConfig(headroom=headroom, chunk_bytes=chunk_bytes)
            return DecodeRole(self.transfers(side, DECODE), side.pool, LAYOUT, config)

        self.prefill = Side(PREFILL_WEIGHT, num_blocks, prefill_role, depth=depth, looked=looked, **config)
        self.decode = Side(DECODE_WEIGHT, decode_blocks or num_blocks, decode_role, depth=depth)

    def transfers(self, side: Side, address: LaneAddress) -> TransferLeader:
        """A worker's ends of its lanes, both ways."""
        sender, receiver = self.exchange.sender(address, LAYOUT), self.exchange.receiver(address, LAYOUT)
        transfer = RankTransfer(
            side.runner, LAYOUT, sender=sender, receiver=receiver, follows_layers=self.follows_layers
        )
        side.runner.watch(transfer.after_layer)
        return TransferLeader(transfer)

    @property
    def prefill_role(self) -> PrefillRole:
        role = self.prefill.scheduler.role
        assert isinstance(role, PrefillRole)
        return role

    @property
    def decode_role(self) -> DecodeRole:
        role = self.decode.scheduler.role
        assert isinstance(role, DecodeRole)
        return role

    def reserve(self, request_id: str, prompt_ids: tuple[int, ...], **changes: Any) -> Ticket:
        asked: dict[str, Any] = {
            "generation": 1,
            "lease_s": LEASE_S,
            "source": PREFILL,
            "source_layout": LAYOUT,
        } | changes
        request = ReserveRequest(request_id=request_id, prompt_ids=prompt_ids, **asked)
        ticket = self.decode_role.reserve(request, self.now)
        self.check()
        return ticket

    def read(
        self, request_id: str, prompt_ids: tuple[int, ...], ticket: Ticket | None, *, max_tokens: int = NUM_ANSWER
    ) -> None:
        self.prefill.engine.submit(_request(request_id, prompt_ids, (), ticket, max_tokens), self.now)

    def answer(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        ticket: Ticket | None,
        first: tuple[int, ...] | None = None,
        *,
        max_tokens: int = NUM_ANSWER,
    ) -> None:
        """Hands the request over, with the token that prefill has made (or would have)."""
        tokens = expected(prompt_ids, 1) if first is None else first
        self.decode.engine.submit(_request(request_id, prompt_ids, tokens, ticket, max_tokens), self.now)

    def start(self, request_id: str, prompt_ids: tuple[int, ...], **changes: Any) -> Ticket:
        ticket = self.reserve(request_id, prompt_ids, **changes)
        self.read(request_id, prompt_ids, ticket)
        return ticket

    def state(self, ticket_id: str = "r", generation: int = 1) -> str | None:
        """Where the decode worker's ledger sees a ticket."""
        return self.decode_role.ledger.state(ticket_id, generation)

    def bring_to(self, reached: str) -> Ticket:
        """Brings the ticket "r", of three blocks for `prompt(12)`, to a state. Chunks must be of one block."""
        self.post.holding = True
        ticket = self.start("r", prompt(12))
        self.step(4)
        self.post.deliver({"reserved": 0, "sending": 1, "arrived": None}[reached])
        self.step()
        assert self.state() == reached
        return ticket

    def step(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.prefill.step(self.now)
            self.decode.step(self.now)
            self.check()

    def check(self) -> None:
        for side, role in ((self.prefill, self.prefill_role), (self.decode, self.decode_role)):
            role.ledger.check_integrity()
            side.engine.check_integrity([*role.ledger.reserved_ids(), *role.outgoing.shared_ids()])

    def finish(self) -> None:
        """Delivers all there is, steps until nothing is left to do, and proves that nothing is held."""
        self.post.holding = False
        self.post.deliver()
        for _ in range(300):
            if not (self.prefill.engine.has_work() or self.decode.engine.has_work()):
                break
            self.step()
        self.assert_idle()

    def assert_idle(self) -> None:
        self.decode_role.ledger.assert_idle()
        self.prefill.engine.assert_idle()
        self.decode.engine.assert_idle()

    def text(self, request_id: str) -> tuple[int, ...]:
        """All that the client has got."""
        return self.prefill.tokens[request_id] + self.decode.tokens[request_id]


def _request(
    request_id: str, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...], ticket: Ticket | None, max_tokens: int
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        ticket=ticket,
    )
