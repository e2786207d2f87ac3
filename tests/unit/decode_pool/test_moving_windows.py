"""KV in groups of layers, some with windows, between two workers: what is read there has come, and no more."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decode_pool.decode_role import DecodeRole
from kvtransfer.events import EventLog
from kvtransfer.hashing import chain_hashes
from kvtransfer.transports.inproc import InprocExchange
from prefill_pool.prefill_role import PrefillRole
from protos.values import (
    FinishReason,
    GenerateRequest,
    KVGroup,
    KVLayout,
    LaneAddress,
    MoveRequest,
    ReserveRequest,
    SamplingParams,
    ShareRequest,
    Ticket,
)
from tests.unit.decode_pool.pair import Post
from tests.unit.workers.harness import VOCAB
from tests.unit.workers.pages import PageCopies, PageRunner, answer
from tests.unit.workers.sync_pipeline import SyncPipeline
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.kv.host import HostPool
from workers.scheduling.scheduler import Scheduler
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import SchedulerConfig, TransferConfig

Windows = tuple[int | None, ...]


def layout_of(windows: Windows, block_size: int) -> KVLayout:
    parts = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32").parts
    groups = tuple(KVGroup(layers=(layer,), parts=parts, window=window) for layer, window in enumerate(windows))
    return KVLayout(groups=groups, block_size=block_size, device="cpu")


class Worker:
    def __init__(
        self,
        name: str,
        windows: Windows,
        block_size: int,
        exchange: InprocExchange,
        *,
        prefills: bool,
        num_pages: int,
        host_slots: int = 0,
    ) -> None:
        self.address = LaneAddress(worker_id=name, incarnation=1, host="127.0.0.1", port=0)
        self.layout = layout_of(windows, block_size)
        self.runner = PageRunner(windows, block_size)
        self.copies = PageCopies(self.runner)
        log = EventLog(incarnation=1)
        host = None
        if host_slots:
            host = HostPool(host_slots, self.copies, log.record, block_bytes=1, num_groups=len(windows))
        self.pool = BlockPool(num_pages, block_size, log.record, host=host, windows=windows)
        sender = exchange.sender(self.address, self.layout)
        receiver = exchange.receiver(self.address, self.layout)
        transfers = TransferLeader(RankTransfer(self.runner, self.layout, sender=sender, receiver=receiver))
        if prefills:
            self.role: DecodeRole | PrefillRole = PrefillRole(transfers, self.pool, self.layout)
        else:
            chunk_bytes = 2 * self.layout.block_bytes
            config = TransferConfig(headroom=0.0, chunk_bytes=chunk_bytes)
            self.role = DecodeRole(transfers, self.pool, self.layout, config)
        limits = SchedulerConfig(max_model_len=400, vocab_size=VOCAB, prefill_chunk=8, time_slice_s=math.inf)
        scheduler = Scheduler(limits, self.pool, self.role)
        self.engine = Engine(scheduler, SyncPipeline(self.runner), events=log, clock=lambda: 0.0)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def reserve(self, request_id: str, token_ids: tuple[int, ...], source: Worker, *, room: int = 0) -> Ticket:
        asked = ReserveRequest(
            request_id=request_id,
            prompt_ids=token_ids,
            num_tokens=len(token_ids) + room,
            source=source.address,
            source_layout=source.layout,
        )
        return self.role.reserve(asked, 0.0)

    def submit(self, request: GenerateRequest) -> None:
        text = request.prompt_ids + answer(request.prompt_ids, request.sampling.max_tokens)
        self.runner.expect(request.request_id, text)
        self.engine.submit(request, 0.0)

    def step(self) -> None:
        for update in self.engine.step(0.0):
            assert update.error is None, update.error
            self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.finish_reason
        self.engine.check_integrity([*self.role.ledger.reserved_ids(), *self.role.outgoing.shared_ids()])
        self.role.ledger.check_integrity()


@dataclass
class Two:
    """`seed` decides which parcels wait."""

    windows: Windows
    sizes: tuple[int, int] = (4, 4)
    prefills: bool = False
    seed: int | None = None
    host_slots: int = 0
    post: Post = field(default_factory=Post)

    def __post_init__(self) -> None:
        exchange = InprocExchange(self.post)
        self.old = Worker(
            "w0",
            self.windows,
            self.sizes[0],
            exchange,
            prefills=self.prefills,
            num_pages=400,
            host_slots=self.host_slots,
        )
        self.new = Worker("w1", self.windows, self.sizes[1], exchange, prefills=False, num_pages=400)
        self._rng = random.Random(self.seed)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.seed is not None:
                self.post.holding = self._rng.random() < 0.6
                self.post.deliver(self._rng.randrange(3))
            self.old.step()
            self.new.step()

    def finish(self) -> None:
        self.seed, self.post.holding = None, False
        self.post.deliver()
        for _ in range(2_000):
            if not (self.old.engine.has_work() or self.new.engine.has_work()):
                break
            self.step()
        self.old.engine.assert_idle()
        self.new.engine.assert_idle()

    def disaggregate(self, request_id: str, prompt_ids: tuple[int, ...], num_tokens: int = 9) -> list[int]:
        ticket = self.new.reserve(request_id, prompt_ids, self.old)
        request = _request(request_id, prompt_ids, num_tokens)
        self.old.submit(replace(request, ticket=ticket))
        while request_id not in self.old.ended:
            self.step()
        first = self.old.tokens[request_id]
        self.new.submit(replace(request, output_ids=tuple(first), ticket=ticket))
        self.finish()
        return first + self.new.tokens[request_id]

    def move(self, request_id: str, prompt_ids: tuple[int, ...], *, before: int, num_tokens: int) -> list[int]:
        request = _request(request_id, prompt_ids, num_tokens)
        self.old.submit(request)
        while len(self.old.tokens.get(request_id, ())) < before:
            self.step()
        tokens = (*prompt_ids, *self.old.tokens[request_id])
        ticket = self.new.reserve(request_id, tokens[:-1], self.old, room=24)
        self.old.engine.migrate(MoveRequest(request_id=request_id, ticket=ticket), 0.0)
        while request_id not in self.old.ended:
            self.step()
        if self.old.ended[request_id] is FinishReason.MOVED:
            output = tuple(self.old.tokens[request_id])
            self.new.submit(replace(request, output_ids=output, ticket=ticket))
        else:
            self.new.engine.abort([request_id])
        self.finish()
        return self.old.tokens[request_id] + self.new.tokens.get(request_id, [])

    def pull(self, request_id: str, prompt_ids: tuple[int, ...], *, of: tuple[int, ...]) -> tuple[list[int], int]:
        """Returns the answer, and how many blocks of the new worker were pulled, of the prefix `of`."""
        ticket = self.new.reserve(f"{request_id}/pull", of, self.old)
        hashes = tuple(chain_hashes(of, self.old.pool.block_size))
        num_blocks = self.old.engine.share(ShareRequest(ticket=ticket, hashes=hashes), 0.0)
        pull = ticket.up_to(min(ticket.starts) + num_blocks) if num_blocks else None
        if pull is None:
            self.new.engine.abort([ticket.ticket_id])
        self.new.submit(replace(_request(request_id, prompt_ids, 5), pull=pull))
        self.finish()
        return self.new.tokens[request_id], num_blocks


def _request(request_id: str, prompt_ids: tuple[int, ...], num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling)


WINDOWS = st.lists(st.sampled_from([None, 1, 3, 5, 9, 30]), min_size=1, max_size=3).map(tuple)
SIZES = st.sampled_from([(4, 4), (8, 2), (2, 8), (1, 4), (16, 4)])
LONG = tuple(7 * index % VOCAB for index in range(100))


@settings(max_examples=12)
@given(windows=WINDOWS, sizes=SIZES, length=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_prompt_moves_with_the_pages_of_its_windows(
    windows: Windows, sizes: tuple[int, int], length: int, seed: int
) -> None:
    """Also with cached earlier prompts, and blocks of other sizes."""
    two = Two(windows, sizes, prefills=True, seed=seed)
    assert two.disaggregate("a", LONG[:length]) == list(answer(LONG[:length], 9))
    two.seed = seed
    for name, start in (("b", length // 2), ("c", length)):
        prompt_ids = (*LONG[:start], 3, 4, 5)
        assert two.disaggregate(name, prompt_ids) == list(answer(prompt_ids, 9))


@settings(max_examples=12)
@given(windows=WINDOWS, sizes=SIZES, length=st.integers(1, 40), before=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_a_sequence_moves_while_its_windows_slide(
    windows: Windows, sizes: tuple[int, int], length: int, before: int, seed: int
) -> None:
    two = Two(windows, sizes, seed=seed)
    assert two.move("a", LONG[:length], before=before, num_tokens=40) == list(answer(LONG[:length], 40))
    assert two.move("b", LONG[: length + 5], before=before, num_tokens=40) == list(answer(LONG[: length + 5], 40))


@settings(max_examples=12)
@given(windows=WINDOWS, sizes=SIZES, length=st.integers(1, 60), num_pulled=st.integers(1, 60))
@example(windows=(5,), sizes=(8, 2), length=10, num_pulled=12)
@example(windows=(9,), sizes=(1, 4), length=10, num_pulled=12)
def test_a_prefix_is_pulled_with_the_pages_later_tokens_read(
    windows: Windows, sizes: tuple[int, int], length: int, num_pulled: int
) -> None:
    two = Two(windows, sizes)
    two.old.submit(_request("before", LONG[:60], 3))
    two.finish()
    prompt_ids = (*LONG[:length], 3, 4, 5)
    size = two.sizes[1]
    prefix = prompt_ids[: max(1, min(num_pulled, len(prompt_ids) - 1) // size * size)]
    assert two.pull("a", prompt_ids, of=prefix)[0] == list(answer(prompt_ids, 5))


@pytest.mark.parametrize(("windows", "num_pages"), [((None, 8), 25 + 2), ((8,), 2), ((None, 8, 8), 25 + 4)])
def test_of_a_window_the_tail_is_moved(windows: Windows, num_pages: int) -> None:
    """Positions 92 to 99 of a prompt of 100 tokens: the last may be computed again."""
    two = Two(windows, prefills=True)
    assert two.disaggregate("a", LONG) == list(answer(LONG, 9))
    assert two.new.runner.num_moved == 4 * num_pages
    assert two.new.engine.load().transfer_bytes == 4 * num_pages * 8


def test_a_long_sequence_moves_with_the_windows_that_it_has_then() -> None:
    two = Two((None, 8))
    assert two.move("a", LONG, before=50, num_tokens=80) == list(answer(LONG, 80))
    num_full = -(-two.new.runner.num_moved // 4)
    assert 37 + 3 <= num_full <= 37 + 6


def test_a_prefix_without_the_windows_pages_is_computed() -> None:
    two = Two((None, 8))
    two.old.submit(_request("before", LONG, 3))
    two.finish()
    assert two.pull("a", LONG, of=LONG[:96]) == (list(answer(LONG, 5)), 24)
    assert two.new.runner.num_moved == 4 * (24 + 2)
    two = Two((None, 8))
    two.old.submit(_request("before", LONG, 3))
    two.finish()
    two.old.pool.clear()
    assert two.pull("a", LONG, of=LONG[:96]) == (list(answer(LONG, 5)), 0)


@pytest.mark.parametrize("windows", [(None, 8), (8,), (None, 8, 30)])
@pytest.mark.parametrize("patience", [0, 4])
@pytest.mark.parametrize("num_kept", [0, 10])
def test_windows_that_only_the_host_has_are_loaded_and_pushed(windows: Windows, patience: int, num_kept: int) -> None:
    two = Two(windows, host_slots=400)
    two.old.submit(_request("before", LONG, 3))
    two.finish()
    pages = two.old.pool.allocate(two.old.pool.num_free - num_kept)
    assert pages is not None
    two.old.pool.release(pages)
    two.old.copies.patience = patience
    two.old.submit(_request("busy", (5, 6, 7), 20))
    two.step(2)
    assert two.pull("a", (*LONG, 3), of=LONG) == (
        list(answer((*LONG, 3), 5)),
        two.new.pool.blocks_for(100) - _first(two),
    )
    assert two.new.engine.load().num_pulled_tokens == 100
    assert two.old.copies.num_onloaded > 0 or num_kept


def _first(two: Two) -> int:
    """The first block of a ticket for LONG."""
    return min(two.new.pool.windows.num_passed(99))
