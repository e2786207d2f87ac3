"""Two pools and everything that can happen between them, in any order: hypothesis looks for one that leaks or lies.

Offers, messages that come late, out of order or never, aborts by either side, leases that end, newer generations, lanes
that are cut, workers that crash and come back. After every step each block has one owner, at the end nobody has any.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decode_pool.decode_role import DecodeRole
from kvtransfer.transport import peer_name
from prefill_pool.prefill_role import PrefillRole
from protos.errors import Overloaded, TransferFailed
from protos.values import FinishReason, LaneAddress, Ticket
from tests.unit.decode_pool.pair import (
    DECODE,
    DECODE_WEIGHT,
    LAYOUT,
    LEASE_S,
    PREFILL,
    PREFILL_WEIGHT,
    Pair,
    Side,
    expected,
    prompt,
)
from workers.worker_config import TransferConfig

NUM_BLOCKS = 24
PROMPTS = [prompt(3 + 5 * number, seed=number % 2) for number in range(5)]
NUMBERS = st.integers(0, len(PROMPTS) - 1)
SIDES = st.sampled_from(["prefill", "decode"])


class TwoPools(RuleBasedStateMachine):
    """One client at a time asks each prompt. `asked` are the tickets of those that have not crashed away."""

    @initialize(follows_layers=st.booleans())
    def begin(self, follows_layers: bool) -> None:
        self.pair = Pair(num_blocks=NUM_BLOCKS, chunk_blocks=1, staged_blocks=2, follows_layers=follows_layers)
        self.pair.post.holding = True
        self.addresses = {"prefill": PREFILL, "decode": DECODE}
        self.asked: dict[int, Ticket] = {}
        self.handed_over: dict[str, int] = {}
        self.attempts = 0

    @rule(number=NUMBERS)
    def ask(self, number: int) -> None:
        self.attempts += 1
        self.reserve_and_read(f"{self.attempts}-{number}", number, generation=1)

    @rule(number=NUMBERS)
    def ask_again_with_a_newer_generation(self, number: int) -> None:
        """Messages of the older generation must not be taken for the newer one's."""
        if number in self.asked and self.asked[number].ticket_id not in self.handed_over:
            older = self.asked[number]
            self.pair.prefill.engine.abort([older.ticket_id])
            self.pair.step()
            self.reserve_and_read(older.ticket_id, number, generation=older.generation + 1)

    def reserve_and_read(self, name: str, number: int, generation: int) -> None:
        source = self.addresses["prefill"]
        try:
            ticket = self.pair.reserve(name, PROMPTS[number], generation=generation, source=source)
        except (Overloaded, TransferFailed):
            return
        self.asked[number] = ticket
        self.pair.read(name, PROMPTS[number], ticket)

    @rule(number=NUMBERS)
    def hand_over(self, number: int) -> None:
        ticket = self.asked.get(number)
        if ticket is not None and ticket.ticket_id not in self.handed_over:
            self.handed_over[ticket.ticket_id] = number
            self.pair.answer(ticket.ticket_id, PROMPTS[number], ticket)

    @rule(which=st.integers(0, 30))
    def a_message_arrives(self, which: int) -> None:
        """Any of those under way, not only the oldest."""
        held = self.pair.post.kept
        if held:
            held.pop(which % len(held))()

    @rule(number=NUMBERS, side=SIDES)
    def abort(self, number: int, side: str) -> None:
        if number in self.asked:
            getattr(self.pair, side).engine.abort([self.asked[number].ticket_id])

    @rule()
    def the_lane_is_cut(self) -> None:
        self.pair.exchange.cut(self.addresses["prefill"], self.addresses["decode"], "cut")

    @rule(side=SIDES)
    def crash(self, side: str) -> None:
        """Loses the worker without a goodbye; its next life has another incarnation."""
        old = self.addresses[side]
        other = self.addresses["decode" if side == "prefill" else "prefill"]
        self.pair.exchange.cut(old, other, "crashed")
        self.pair.exchange.cut(other, old, "crashed")
        getattr(self.pair, f"{side}_role")._transfers.close()
        self.addresses[side] = new = replace(old, incarnation=old.incarnation + 1)
        if side == "prefill":
            self.pair.prefill = Side(PREFILL_WEIGHT, NUM_BLOCKS, lambda half: self.prefill_role(half, new))
        else:
            self.pair.decode = Side(DECODE_WEIGHT, NUM_BLOCKS, lambda half: self.decode_role(half, new))
            self.asked.clear()
            self.handed_over.clear()

    def prefill_role(self, side: Side, address: LaneAddress) -> PrefillRole:
        config = TransferConfig(chunk_bytes=LAYOUT.block_bytes)
        return PrefillRole(self.pair.transfers(side, address), side.pool, LAYOUT, config)

    def decode_role(self, side: Side, address: LaneAddress) -> DecodeRole:
        config = TransferConfig(headroom=0.0, chunk_bytes=LAYOUT.block_bytes)
        return DecodeRole(self.pair.transfers(side, address), side.pool, LAYOUT, config)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.pair.step(count)

    @rule()
    def wait(self) -> None:
        self.pair.step(seconds=LEASE_S / 3)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.pair.check()
        for ticket in self.pair.decode_role.tickets(self.pair.now):
            assert ticket.age_s <= 4 * LEASE_S, "a ticket outlives silence"

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.finish()
        names = {peer_name(address) for address in self.addresses.values()}
        assert {lane.peer for lane in self.pair.decode_role._transfers.lanes()} <= names, (
            "a lane to a life that is over"
        )
        for name, number in self.handed_over.items():
            got, right = self.pair.decode.tokens[name], expected(PROMPTS[number])[1:]
            assert got == right[: len(got)], "a wrong answer: KV of another ticket, or of nobody"
            assert self.pair.decode.ended.get(name) is not FinishReason.LENGTH or got == right


TestTwoPools = TwoPools.TestCase
TestTwoPools.settings = settings(max_examples=60, stateful_step_count=30)
