"""A cached prefix is fetched, not computed: who has it pins it while it is sent; what does not come is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from decode_pool.decode_role import DecodeRole
from kvtransfer.hashing import chain_hashes
from kvtransfer.transport import Chunk
from kvtransfer.transports.inproc import InprocExchange
from protos.errors import InvalidRequest
from protos.values import GenerateRequest, ReserveRequest, SamplingParams, ShareRequest, Ticket
from tests.unit.decode_pool.pair import BLOCK_BYTES, DECODE, LAYOUT, SIZE, VOCAB, Pair, expected, prompt
from tests.unit.decode_pool.test_moving import NEW_WEIGHT, OLD, Pool, made_by
from tests.unit.workers.toy import ToyRunner
from workers.kv.block_pool import BlockPool
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.send import Outgoing
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SHARED = prompt(24)
PROMPT = (*SHARED, 7, 8, 9)


class Pulling(Pool):
    """The old worker has SHARED cached; the new one reads PROMPT. The tests are their gateway."""

    def __init__(self, **more: int) -> None:
        super().__init__(**more)
        self.old.engine.submit(GenerateRequest(request_id="before", prompt_ids=SHARED, sampling=GREEDY), 0.0)
        self.finish()

    def evict(self, num_kept: int = 0) -> None:
        """From the old worker's device, all but the first blocks."""
        taken = self.old.pool.allocate(self.old.pool.num_free - num_kept)
        assert taken is not None
        self.old.pool.release(taken)
        assert len(self.old.pool.match(chain_hashes(SHARED, SIZE))) == num_kept

    def reserve(self) -> Ticket:
        role = self.new.scheduler.role
        assert isinstance(role, DecodeRole)
        asked = ReserveRequest(request_id="r/pull", prompt_ids=SHARED, source=OLD, source_layout=LAYOUT)
        return role.reserve(asked, self.now)

    def share(self, ticket: Ticket) -> int:
        asked = ShareRequest(ticket=ticket, hashes=tuple(chain_hashes(SHARED, SIZE)))
        return self.old.engine.share(asked, self.now)

    def read(self, pull: Ticket | None, **sampling: Any) -> None:
        request = GenerateRequest(
            request_id="r",
            prompt_ids=PROMPT,
            sampling=replace(GREEDY, **sampling),
            pull=pull,
        )
        self.new.engine.submit(request, self.now)

    def check_answer(self, *, num_computed: int, num_cached: int) -> None:
        self.finish()
        assert self.new.tokens["r"] == made_by([NEW_WEIGHT] * 6, PROMPT, GREEDY)
        assert self.new.runner.num_computed == num_computed + 5
        assert self.new.cached["r"] == num_cached


def test_only_uncached_blocks_are_computed() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    assert pool.share(ticket) == 6
    pool.read(ticket)
    pool.check_answer(num_computed=3, num_cached=24)
    assert pool.new.engine.load().num_pulled_tokens == 24
    assert pool.old.engine.load().transfer_bytes == 6 * BLOCK_BYTES


def test_cached_blocks_of_the_reader_are_not_sent() -> None:
    pool = Pulling()
    pool.new.engine.submit(GenerateRequest(request_id="s", prompt_ids=SHARED[:9], sampling=GREEDY), 0.0)
    pool.finish()
    before = pool.new.runner.num_computed
    ticket = pool.reserve()
    assert ticket.num_cached_tokens == 8
    assert pool.share(ticket) == 4
    pool.read(ticket)
    pool.new.runner.num_computed -= before
    pool.check_answer(num_computed=3, num_cached=24)
    assert pool.new.engine.load().num_pulled_tokens == 16


def test_a_reader_waits_for_its_blocks_and_others_do_not() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    pool.post.holding = True
    pool.share(ticket)
    pool.read(ticket)
    pool.new.engine.submit(GenerateRequest(request_id="other", prompt_ids=(1, 2, 3), sampling=GREEDY), 0.0)
    pool.step(3)
    assert pool.new.tokens["r"] == ()
    assert len(pool.new.tokens["other"]) == 3
    pool.post.holding = False
    pool.post.deliver()
    pool.finish()
    assert pool.new.tokens["r"] == made_by([NEW_WEIGHT] * 6, PROMPT, GREEDY)


@pytest.mark.parametrize(("there", "num_blocks", "own"), [(8, 1, [2, 3]), (2, 9, [0, 1, 2, 3, 4])])
def test_blocks_of_another_size_are_shared_as_far_as_they_fill(there: int, num_blocks: int, own: list[int]) -> None:
    """The holder has five blocks of four tokens; the reader, which has its own first block, asks for ten at most."""
    pool, pushed = BlockPool(8, SIZE, lambda event: None), []

    class Moves(TransferLeader):
        def open(self, ticket: Ticket) -> None: ...

        def can_push(self, ticket: Ticket) -> bool:
            return True

        def push(
            self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None
        ) -> None:
            pushed.append((chunk.first_block, chunk.num_blocks, list(block_ids)))

        def poll_sent(self) -> Sequence[Any]:
            return ()

    ends = InprocExchange()
    hashes = tuple(chain_hashes(SHARED, SIZE))[:5]
    held = pool.allocate(5) or []
    for block_id, block_hash in zip(held, hashes, strict=True):
        pool.seal(block_id, block_hash)
    pool.release(held)
    sender, receiver = ends.sender(OLD, LAYOUT), ends.receiver(OLD, LAYOUT)
    transfer = RankTransfer(ToyRunner(1, SIZE, VOCAB), LAYOUT, sender=sender, receiver=receiver)
    outgoing = Outgoing(Moves(transfer), pool, LAYOUT, TransferConfig())
    ticket = Ticket(
        ticket_id="r/pull", generation=1, lease_s=9.0, block_ids=tuple(range(10)), num_cached_tokens=there,
        layout=replace(LAYOUT, block_size=there), destination=DECODE,
    )  # fmt: skip
    shared = outgoing.share(ticket, hashes, 0.0)
    outgoing.tick(0.0)
    assert shared == num_blocks
    ((first, count, blocks),) = pushed
    assert (first, count) == (0, num_blocks)
    assert blocks == [held[index] for index in own]
    pool.assert_idle()


def test_a_profile_counts_the_bytes_of_the_readers_blocks() -> None:
    ends, wide = InprocExchange(), replace(LAYOUT, block_size=2 * SIZE)
    transfer = RankTransfer(ToyRunner(1, SIZE, VOCAB), LAYOUT, sender=ends.sender(OLD, LAYOUT))
    ends.receiver(DECODE, wide).expect(OLD, LAYOUT)
    transfer.timeline.record(True)
    ticket = Ticket(
        ticket_id="r", generation=1, lease_s=9.0, block_ids=(0,), num_cached_tokens=0, layout=wide, destination=DECODE
    )
    transfer.push(ticket, Chunk(ticket_id="r", generation=1, first_block=0, num_blocks=1), [0, 1])
    ((gather,), _) = transfer.timeline.record()
    assert gather.kv is not None
    assert gather.kv.num_bytes == wide.block_bytes


@pytest.mark.parametrize("num_kept", [0, 2])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("patience", [0, 4])
def test_blocks_on_the_host_are_loaded_and_pushed(patience: int, busy: bool, num_kept: int) -> None:
    pool = Pulling(host_slots=40)
    pool.evict(num_kept)
    pool.old.copies.patience = patience
    if busy:
        pool.run("other", prompt(5, seed=2))
        pool.step(2)
    ticket = pool.reserve()
    assert pool.share(ticket) == 6
    pool.read(ticket)
    before = len(pool.old.tokens["other"])
    pool.step(2)
    assert len(pool.old.tokens["other"]) - before == 2 * busy
    pool.check_answer(num_computed=3, num_cached=24)
    assert pool.new.engine.load().num_pulled_tokens == 24
    assert len(pool.old.pool.match(chain_hashes(SHARED, SIZE))) == 6, "it is cached there again"


@pytest.mark.parametrize("patience", range(4))
def test_a_chain_loaded_by_another_request_is_pushed_in_place(patience: int) -> None:
    pool = Pulling(host_slots=40)
    pool.evict()
    pool.run("other", prompt(5, seed=2))
    pool.step(2)
    pool.old.copies.patience = patience
    pool.run("beginning", SHARED[:9])
    pool.step()
    ticket = pool.reserve()
    assert pool.share(ticket) == 6
    pool.read(ticket)
    pool.check_answer(num_computed=3, num_cached=24)


def test_a_load_that_is_over_at_once_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a load may settle before anything is reported."""
    pool = Pulling(host_slots=40)
    pool.evict()
    copies = pool.old.copies
    await_copy = copies.await_copy

    def await_for_good(load_id: int) -> None:
        copies._looks.pop(load_id, None)
        await_copy(load_id)

    monkeypatch.setattr(copies, "await_copy", await_for_good)
    ticket = pool.reserve()
    assert pool.share(ticket) == 6
    assert pool.old.pool.host is not None
    assert pool.old.pool.host.load().num_loaded == 6
    pool.read(ticket)
    pool.check_answer(num_computed=3, num_cached=24)


def test_as_many_host_blocks_are_loaded_as_there_is_room() -> None:
    pool = Pulling(host_slots=40)
    pool.evict()
    held = pool.old.pool.allocate(60)
    assert held is not None
    ticket = pool.reserve()
    num_blocks = pool.share(ticket)
    assert num_blocks == 4
    pool.read(ticket.up_to(min(ticket.starts) + num_blocks))
    pool.old.pool.release(held)
    pool.check_answer(num_computed=27 - 16, num_cached=16)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_pull_during_a_load_leaves_nothing(num_steps: int) -> None:
    pool = Pulling(host_slots=40)
    pool.evict()
    pool.run("other", prompt(5, seed=2))
    pool.step(2)
    pool.old.copies.patience = 2
    ticket = pool.reserve()
    pool.share(ticket)
    pool.read(ticket)
    pool.step(num_steps)
    pool.old.engine.abort(["r/pull"])
    pool.new.engine.abort(["r", "r/pull"])
    pool.finish()


def test_evicted_blocks_are_computed_and_the_rest_arrives() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    taken = pool.old.pool.allocate(pool.old.pool.num_free - 3)  # the tail of a chain goes first
    assert taken is not None
    num_blocks = pool.share(ticket)
    assert num_blocks == 3
    pool.old.pool.release(taken)
    pool.read(ticket.up_to(min(ticket.starts) + num_blocks))
    pool.check_answer(num_computed=27 - 12, num_cached=12)


def test_a_worker_that_has_nothing_any_more_says_so() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    pool.old.pool.clear()
    assert pool.share(ticket) == 0
    assert pool.new.engine.abort(["r/pull"]) == 1
    pool.read(None)
    pool.check_answer(num_computed=27, num_cached=0)


def test_blocks_are_pinned_while_they_wait_to_be_sent() -> None:
    pool = Pulling()
    pool.exchange.max_staged_bytes = BLOCK_BYTES
    pool.post.holding = True
    ticket = pool.reserve()
    pool.share(ticket)
    pool.step(2)
    assert pool.old.pool.allocate(pool.old.pool.num_blocks - 5) is None, "six of them must not be evicted"
    pool.read(ticket)
    pool.check_answer(num_computed=3, num_cached=24)


def test_nothing_is_held_for_a_lane_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(ticket: Ticket) -> None:
        raise RuntimeError("can't start new thread")

    pool = Pulling()
    ticket = pool.reserve()
    role = pool.old.scheduler.role
    assert isinstance(role, DecodeRole)
    monkeypatch.setattr(role.outgoing._transfers, "open", no_thread)
    with pytest.raises(RuntimeError):
        pool.share(ticket)
    pool.old.pool.assert_idle()
    assert not role.outgoing.busy()
    pool.read(None)
    pool.new.engine.abort(["r/pull"])
    pool.check_answer(num_computed=27, num_cached=0)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_lane_that_is_lost_costs_a_computation(num_steps: int) -> None:
    pool = Pulling()
    pool.post.holding = True
    ticket = pool.reserve()
    pool.share(ticket)
    pool.read(ticket)
    pool.step(num_steps)
    pool.exchange.cut(OLD, pool.new.scheduler.role._transfers.address, "the wire was cut")  # type: ignore[attr-defined]
    pool.post.kept.clear()
    pool.check_answer(num_computed=27, num_cached=0)
    assert pool.new.engine.load().num_failed_pulls == 1


def test_a_lease_that_ends_costs_a_computation() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    pool.read(ticket)  # and nobody shares anything
    pool.step(40)
    pool.check_answer(num_computed=27, num_cached=0)


def test_prompt_logprobs_are_computed_whatever_was_pulled() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    pool.share(ticket)
    pool.read(ticket, prompt_logprobs=0)
    pool.check_answer(num_computed=27, num_cached=0)


@pytest.mark.parametrize("shares", [False, True], ids=["not sent", "on its way"])
def test_a_pull_made_useless_by_prompt_logprobs_is_released(shares: bool) -> None:
    pool = Pulling()
    pool.post.holding = True
    ticket = pool.reserve()
    if shares:
        pool.share(ticket)
    num_free = pool.new.pool.num_free
    pool.read(ticket, prompt_logprobs=0)
    pool.step()
    assert len(pool.new.tokens["r"]) == 1
    assert pool.new.engine.load().num_tickets == 0
    assert pool.new.pool.num_free == num_free + len(ticket.block_ids) - pool.new.pool.blocks_for(len(PROMPT))
    pool.post.holding = False
    pool.post.deliver()
    pool.check_answer(num_computed=27, num_cached=0)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_at_any_time_leaves_nothing_behind(num_steps: int) -> None:
    pool = Pulling()
    pool.exchange.max_staged_bytes = BLOCK_BYTES
    pool.post.holding = num_steps % 2 == 0
    ticket = pool.reserve()
    pool.share(ticket)
    pool.read(ticket)
    pool.step(num_steps)
    pool.new.engine.abort(["r", "r/pull"])
    pool.old.engine.abort(["r/pull"])
    pool.finish()


def test_a_ticket_is_shared_once() -> None:
    pool = Pulling()
    ticket = pool.reserve()
    pool.post.holding = True
    pool.exchange.max_staged_bytes = BLOCK_BYTES
    pool.share(ticket)
    with pytest.raises(InvalidRequest, match="being served"):
        pool.share(ticket)
    pool.new.engine.abort(["r/pull"])
    pool.finish()


def test_a_prefill_worker_pulls_from_decode_and_pushes_its_own() -> None:
    """The next turn of a conversation: decode has the last answer, prefill reads what is new."""
    pair = Pair()
    first = pair.start("first", SHARED[:17])
    pair.step(2)
    pair.answer("first", SHARED[:17], first)
    pair.finish()
    answer = expected(SHARED[:17])
    turn = (*SHARED[:17], *answer, 5, 6, 7, 8, 9)
    prefix = turn[:20]
    pull = pair.prefill_role.reserve(
        ReserveRequest(request_id="r/pull", prompt_ids=prefix, source=DECODE, source_layout=LAYOUT), pair.now
    )
    assert pull.num_cached_tokens == 16, "the prompt of the first turn"
    shared = pair.decode.engine.share(ShareRequest(ticket=pull, hashes=tuple(chain_hashes(prefix, SIZE))), pair.now)
    assert shared == 1
    before = pair.prefill.runner.num_computed
    ticket = pair.reserve("r", turn)
    request = GenerateRequest(request_id="r", prompt_ids=turn, sampling=GREEDY, ticket=ticket, pull=pull)
    pair.prefill.engine.submit(request, pair.now)
    pair.step(4)
    assert pair.prefill.runner.num_computed - before == len(turn) - 20
    assert pair.prefill.cached["r"] == 20
    pair.answer("r", turn, ticket)
    pair.finish()
    assert pair.text("r") == expected(turn)
