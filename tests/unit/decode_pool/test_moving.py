"""A running sequence goes from one decode worker to another with its KV: each token is made once, by whoever had it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode_pool.decode_role import DecodeRole
from kvtransfer.transports.inproc import InprocExchange
from protos.errors import UnknownRequest, WorkerDraining
from protos.values import (
    FinishReason,
    GenerateRequest,
    LaneAddress,
    MoveRequest,
    ReserveRequest,
    SamplingParams,
    Ticket,
)
from tests.unit.decode_pool.pair import BLOCK_BYTES, LAYOUT, LEASE_S, SIZE, VOCAB, Post, Side, prompt
from tests.unit.workers.toy import toy_kv, toy_token
from workers.batch import Sample
from workers.transfer.rank_transfer import RankTransfer
from workers.transfer.transfer_leader import TransferLeader
from workers.worker_config import TransferConfig

OLD_WEIGHT, NEW_WEIGHT = 5, 11
OLD = LaneAddress(worker_id="d0", incarnation=1, host="127.0.0.1", port=0)
NEW = LaneAddress(worker_id="d1", incarnation=1, host="127.0.0.1", port=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def made_by(weights: Sequence[int], prompt_ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """The answer whose token i was made by the worker with `weights[i]`."""
    kv = [toy_kv(token_id, position) for position, token_id in enumerate(prompt_ids)]
    answer: list[int] = []
    for index, weight in enumerate(weights):
        answer.append(toy_token(kv, weight=weight, vocab_size=VOCAB, sample=Sample(params=params, index=index)))
        kv.append(toy_kv(answer[-1], len(kv)))
    return tuple(answer)


class Pool:
    """Two decode workers. The tests are their gateway: `run`, `ask_to_move`, `go_on`."""

    def __init__(
        self, *, new_blocks: int = 64, old_blocks: int = 64, staged_blocks: int = 1000, host_slots: int = 0
    ) -> None:
        self.post = Post()
        exchange = InprocExchange(self.post, max_staged_bytes=staged_blocks * BLOCK_BYTES)
        self.exchange = exchange
        self.now = 0.0

        def role(address: LaneAddress, side: Side) -> DecodeRole:
            sender, receiver = exchange.sender(address, LAYOUT), exchange.receiver(address, LAYOUT)
            transfers = TransferLeader(RankTransfer(side.runner, LAYOUT, sender=sender, receiver=receiver))
            return DecodeRole(transfers, side.pool, LAYOUT, TransferConfig(chunk_bytes=2 * LAYOUT.block_bytes))

        self.old = Side(OLD_WEIGHT, old_blocks, lambda side: role(OLD, side), host_slots=host_slots)
        self.new = Side(NEW_WEIGHT, new_blocks, lambda side: role(NEW, side))
        self.asked: dict[str, GenerateRequest] = {}

    def run(self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams = GREEDY) -> None:
        self.asked[request_id] = GenerateRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=params)
        self.old.engine.submit(self.asked[request_id], self.now)

    def ask_to_move(self, request_id: str, *, room: int = 16, lease_s: float = LEASE_S) -> Ticket:
        """Room for so many tokens more than there are now."""
        tokens = self.asked[request_id].prompt_ids + self.old.tokens[request_id]
        new_role = self.new.scheduler.role
        assert isinstance(new_role, DecodeRole)
        ticket = new_role.reserve(
            ReserveRequest(
                request_id=request_id,
                prompt_ids=tokens[:-1],
                num_tokens=len(tokens) - 1 + room,
                source=OLD,
                source_layout=LAYOUT,
                lease_s=lease_s,
            ),
            self.now,
        )
        self.old.engine.migrate(MoveRequest(request_id=request_id, ticket=ticket), self.now)
        return ticket

    def go_on(self, request_id: str, ticket: Ticket) -> None:
        """The gateway hears MOVED: the new worker makes the rest."""
        asked = self.asked[request_id]
        self.new.engine.submit(replace(asked, output_ids=self.old.tokens[request_id], ticket=ticket), self.now)

    def move(self, request_id: str, *, room: int = 16) -> None:
        ticket = self.ask_to_move(request_id, room=room)
        self.until_moved(request_id)
        self.go_on(request_id, ticket)

    def until_moved(self, request_id: str) -> None:
        for _ in range(100):
            if self.old.ended.get(request_id) is FinishReason.MOVED:
                return
            self.step()
        raise AssertionError("it never moves")

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 1.0
            for side in (self.old, self.new):
                side.step(self.now)
                role = side.scheduler.role
                assert isinstance(role, DecodeRole)
                role.ledger.check_integrity()
                side.engine.check_integrity([*role.ledger.reserved_ids(), *role.outgoing.shared_ids()])

    def finish(self) -> None:
        self.post.holding = False
        self.post.deliver()
        for _ in range(3000):
            if not (self.old.engine.has_work() or self.new.engine.has_work()):
                break
            self.step()
        self.old.engine.assert_idle()
        self.new.engine.assert_idle()

    def text(self, request_id: str) -> tuple[int, ...]:
        return self.old.tokens[request_id] + self.new.tokens[request_id]

    def check_text(self, request_id: str) -> None:
        """Every token was made once: up to the move by the old worker, from then on by the new one."""
        asked, num_old = self.asked[request_id], len(self.old.tokens[request_id])
        weights = [OLD_WEIGHT] * num_old + [NEW_WEIGHT] * (asked.sampling.max_tokens - num_old)
        assert self.text(request_id) == made_by(weights, asked.prompt_ids, asked.sampling)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=9, max_tokens=40)])
@pytest.mark.parametrize("length", [1, SIZE, 4 * SIZE - 1, 30])
@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_a_sequence_goes_on_with_its_kv_wherever_it_is_cut(length: int, num_steps: int, params: SamplingParams) -> None:
    pool = Pool()
    pool.run("r", prompt(length), params)
    pool.step(num_steps)
    pool.move("r")
    pool.finish()
    pool.check_text("r")
    num_old = len(pool.old.tokens["r"])
    assert num_steps <= num_old < 40
    assert pool.new.runner.num_computed == 40 - num_old, "nothing that the old worker had computed is computed again"


def test_it_goes_on_decoding_while_its_kv_travels() -> None:
    pool = Pool()
    pool.run("r", prompt(30))
    pool.step(2)
    pool.post.holding = True
    ticket = pool.ask_to_move("r", room=40)
    pool.step(10)
    assert len(pool.old.tokens["r"]) == 12, "a slow lane costs no token"
    pool.post.holding = False
    pool.post.deliver()
    pool.until_moved("r")
    pool.go_on("r", ticket)
    pool.finish()
    pool.check_text("r")


def test_it_stops_when_the_room_there_is_used_up() -> None:
    pool = Pool()
    pool.run("r", prompt(8))
    pool.step(2)
    pool.post.holding = True
    ticket = pool.ask_to_move("r", room=3)
    pool.until_moved("r")
    num_old = len(pool.old.tokens["r"])
    assert 8 + num_old - 1 == len(ticket.block_ids) * SIZE, "exactly what there is room for"
    pool.go_on("r", ticket)
    pool.step(3)
    assert len(pool.old.tokens["r"]) == num_old, "a sequence that has moved computes nothing any more"
    pool.finish()
    pool.check_text("r")


def test_cached_blocks_of_the_new_worker_are_not_sent() -> None:
    pool = Pool()
    shared = prompt(24)
    pool.new.engine.submit(GenerateRequest(request_id="before", prompt_ids=shared, sampling=GREEDY), 0.0)
    pool.finish()
    pool.run("r", (*shared, 7, 8, 9))
    pool.step(2)
    ticket = pool.ask_to_move("r")
    assert ticket.num_cached_tokens == 24
    pool.until_moved("r")
    pool.go_on("r", ticket)
    pool.finish()
    pool.check_text("r")
    num_blocks = -(-(27 + len(pool.old.tokens["r"]) - 1) // SIZE) - 6
    assert pool.old.engine.load().transfer_bytes == num_blocks * BLOCK_BYTES


def test_the_room_that_was_not_needed_is_free_at_once() -> None:
    pool = Pool()
    pool.run("r", prompt(8))
    pool.step(2)
    pool.ask_to_move("r", room=100)
    pool.until_moved("r")
    taken = pool.new.pool.num_blocks - pool.new.pool.num_free
    assert taken > 20
    role = pool.new.scheduler.role
    assert isinstance(role, DecodeRole)
    reservation = role.ledger.reservation("r", 1)
    assert reservation is not None
    pool.go_on("r", reservation.ticket)
    pool.step()
    assert pool.new.pool.num_blocks - pool.new.pool.num_free < 5
    pool.finish()
    pool.check_text("r")


def test_a_lost_lane_leaves_the_sequence_in_place() -> None:
    pool = Pool()
    pool.run("r", prompt(30))
    pool.step(2)
    pool.post.holding = True
    pool.ask_to_move("r", room=40)
    pool.step(2)
    pool.exchange.cut(OLD, NEW, "the wire was cut")
    pool.post.kept.clear()
    pool.finish()
    assert pool.old.errors["r"].code == "transfer_failed"
    assert "the wire was cut" in pool.old.errors["r"].message
    assert pool.old.ended["r"] is FinishReason.LENGTH
    assert pool.old.tokens["r"] == made_by([OLD_WEIGHT] * 40, prompt(30), GREEDY)


def test_an_expired_lease_leaves_the_sequence_in_place() -> None:
    pool = Pool()
    pool.run("r", prompt(30))
    pool.step(2)
    pool.post.holding = True
    pool.ask_to_move("r", room=60, lease_s=5.0)
    pool.step(10)
    assert "nothing has moved" in pool.old.errors["r"].message
    assert pool.new.pool.num_free == pool.new.pool.num_blocks
    pool.finish()
    assert pool.old.tokens["r"] == made_by([OLD_WEIGHT] * 40, prompt(30), GREEDY)


def test_a_lane_that_is_lost_after_the_hand_over_fails_it_there() -> None:
    pool = Pool()
    pool.run("r", prompt(10))
    pool.step(2)
    ticket = pool.ask_to_move("r")
    pool.step()  # the full blocks have gone
    pool.post.holding = True
    pool.until_moved("r")
    pool.go_on("r", ticket)
    pool.step()
    pool.exchange.cut(OLD, NEW, "the wire was cut")
    pool.finish()
    assert pool.new.errors["r"].code == "transfer_failed"
    assert pool.new.tokens["r"] == ()


def test_a_sequence_that_ends_meanwhile_needs_to_go_nowhere() -> None:
    pool = Pool()
    pool.run("r", prompt(30), SamplingParams(temperature=0.0, max_tokens=5))
    pool.step(2)
    pool.post.holding = True
    pool.ask_to_move("r", room=40)
    pool.step(6)
    assert pool.old.ended["r"] is FinishReason.LENGTH
    pool.new.engine.abort(["r"])
    pool.post.kept.clear()
    pool.finish()


def test_a_promised_sequence_arrives_at_a_draining_worker() -> None:
    pool = Pool()
    pool.run("r", prompt(10))
    pool.step(2)
    ticket = pool.ask_to_move("r")
    pool.new.engine.drain()
    pool.until_moved("r")
    pool.go_on("r", ticket)
    with pytest.raises(WorkerDraining):
        pool.new.engine.submit(GenerateRequest(request_id="s", prompt_ids=(1, 2), sampling=GREEDY), pool.now)
    pool.finish()
    pool.check_text("r")


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_an_abort_at_any_time_leaves_nothing_behind(num_steps: int) -> None:
    pool = Pool(staged_blocks=1)
    pool.run("r", prompt(14))
    pool.step(2)
    pool.post.holding = num_steps % 2 == 0
    pool.ask_to_move("r", room=8)
    pool.step(num_steps)
    pool.old.engine.abort(["r"])
    pool.new.engine.abort(["r"])
    pool.finish()


def test_sequences_that_do_not_decode_stay() -> None:
    pool = Pool()
    pool.run("r", prompt(9))
    pool.old.engine.migrate(MoveRequest(request_id="r", ticket=_ticket(pool)), pool.now)
    pool.step()
    assert "not in decode" in pool.old.errors["r"].message
    pool.new.engine.abort(["t"])
    pool.finish()
    assert pool.old.ended["r"] is FinishReason.LENGTH


def test_unknown_sequences_cannot_move() -> None:
    pool = Pool()
    with pytest.raises(UnknownRequest, match="nobody"):
        pool.old.engine.migrate(MoveRequest(request_id="nobody", ticket=_ticket(pool)), 0.0)


def test_a_preempted_sequence_moves_once_it_runs_again() -> None:
    pool = Pool(old_blocks=14)
    pool.run("first", prompt(20), replace(GREEDY, max_tokens=24))
    pool.step()
    pool.run("r", prompt(16, seed=2), replace(GREEDY, max_tokens=30))
    pool.step(3)
    pool.post.holding = True
    ticket = pool.ask_to_move("r", room=60)
    for _ in range(40):
        pool.step()
        if pool.old.scheduler.num_preemptions:
            break
    assert pool.old.scheduler.num_preemptions, "the pool is too large for this test"
    pool.post.holding = False
    pool.post.deliver()
    for _ in range(60):
        if "r" in pool.old.ended:
            break
        pool.step()
    if pool.old.ended["r"] is FinishReason.MOVED:
        pool.go_on("r", ticket)
    else:
        pool.new.engine.abort(["r"])
    pool.finish()
    pool.check_text("r")


def _ticket(pool: Pool) -> Ticket:
    role = pool.new.scheduler.role
    assert isinstance(role, DecodeRole)
    return role.reserve(
        ReserveRequest(request_id="t", prompt_ids=prompt(9), source=OLD, source_layout=LAYOUT, num_tokens=20), 0.0
    )
