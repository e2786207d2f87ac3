"""Sequences that move between two workers and prefixes that one pulls from the other, with everything that can happen
meanwhile, in any order: hypothesis looks for an order that leaks, or that changes a token.

The old worker's device is small and evicts to its host, so what is pulled must often be loaded first. The new one's
tokens have another signature: it shows who made which.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decode_pool.decode_role import DecodeRole
from kvtransfer.hashing import chain_hashes
from protos.errors import BatonError
from protos.values import FinishReason, GenerateRequest, ReserveRequest, SamplingParams, ShareRequest, Ticket
from tests.unit.decode_pool.pair import LAYOUT, LEASE_S, SIZE, prompt
from tests.unit.decode_pool.test_moving import NEW, NEW_WEIGHT, OLD, OLD_WEIGHT, Pool, made_by

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
PROMPTS = [prompt(5 + 6 * number, seed=number) for number in range(4)]
NUMBERS = st.integers(0, len(PROMPTS) - 1)


class TwoWriters(RuleBasedStateMachine):
    """Acts as the gateway: a client that hears MOVED continues elsewhere, a puller reads."""

    @initialize(patience=st.integers(0, 3))
    def begin(self, patience: int) -> None:
        self.pool = Pool(old_blocks=18, new_blocks=24, staged_blocks=2, host_slots=40)
        for number, prompt_ids in enumerate(PROMPTS):
            self.pool.run(f"0-{number}", prompt_ids, PARAMS)
            self.pool.finish()
        self.pool.old.copies.patience = patience
        self.pool.post.holding = True
        self.attempts = 0
        self.tickets: dict[str, Ticket] = {}
        self.went_on: set[str] = set()
        self.read: dict[str, int] = {}

    def role(self, name: str) -> DecodeRole:
        role = getattr(self.pool, name).scheduler.role
        assert isinstance(role, DecodeRole)
        return role

    def running(self) -> list[str]:
        return [name for name in self.pool.asked if name not in self.pool.old.ended and self.pool.old.tokens[name]]

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        self.attempts += 1
        self.pool.run(f"{self.attempts}-{number}", PROMPTS[number], PARAMS)

    @rule(which=st.integers(0, 9))
    def move(self, which: int) -> None:
        if not (running := self.running()):
            self.write(which % len(PROMPTS))
            self.pool.step(2)
            running = self.running()
        if running:
            name = running[which % len(running)]
            try:
                self.tickets[name] = self.pool.ask_to_move(name)
            except BatonError:
                return  # no room there, asked before, or it has just ended

    def go_on(self) -> None:
        for name, ticket in self.tickets.items():
            if self.pool.old.ended.get(name) is FinishReason.MOVED and name not in self.went_on:
                self.went_on.add(name)
                self.pool.go_on(name, ticket)

    @rule(number=NUMBERS)
    def pull(self, number: int) -> None:
        """Reads tokens that an eviction cut off or that were never cached."""
        self.attempts += 1
        name, ids = f"{self.attempts}-pulls", PROMPTS[number]
        asked = ReserveRequest(
            request_id=f"{name}/pull", prompt_ids=ids[: len(ids) // SIZE * SIZE], source=OLD, source_layout=LAYOUT,
            lease_s=LEASE_S,
        )  # fmt: skip
        ticket: Ticket | None = None
        try:
            ticket = self.role("new").reserve(asked, self.pool.now)
            hashes = tuple(chain_hashes(asked.prompt_ids, SIZE))
            num_blocks = self.pool.old.engine.share(ShareRequest(ticket=ticket, hashes=hashes), self.pool.now)
            ticket = settled(ticket, num_blocks)
        except BatonError:
            ticket = None
        if ticket is None:
            self.pool.new.engine.abort([asked.request_id])
        self.read[name] = number
        request = GenerateRequest(request_id=name, prompt_ids=ids, sampling=PARAMS, pull=ticket)
        self.pool.new.engine.submit(request, self.pool.now)

    @rule(which=st.integers(0, 9), side=st.sampled_from(["old", "new"]), pulls=st.booleans())
    def abort(self, which: int, side: str, pulls: bool) -> None:
        names = [f"{name}/pull" for name in self.read] if pulls else [*self.pool.asked, *self.read]
        if names:
            getattr(self.pool, side).engine.abort([names[which % len(names)]])

    @rule(cut=st.booleans(), long=st.booleans())
    def trouble(self, cut: bool, long: bool) -> None:
        """A lane is cut, or the cache is forgotten, or nothing happens for a while, so that leases end."""
        if cut:
            self.pool.exchange.cut(OLD, NEW, "cut")
        elif long:
            self.pool.now += LEASE_S / 2
        else:
            self.pool.old.pool.clear()

    @rule(count=st.integers(1, 4), which=st.lists(st.integers(0, 30), min_size=1, max_size=9))
    def step(self, count: int, which: list[int]) -> None:
        """Some of the messages under way arrive, and not only the oldest."""
        for number in which:
            if held := self.pool.post.kept:
                held.pop(number % len(held))()
        self.pool.step(count)
        self.go_on()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "pool"):
            for side in ("old", "new"):
                role, engine = self.role(side), getattr(self.pool, side).engine
                role.ledger.check_integrity()
                engine.check_integrity([*role.ledger.reserved_ids(), *role.outgoing.shared_ids()])

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.go_on()
        self.pool.finish()
        for name, asked in self.pool.asked.items():
            before, after = self.pool.old.tokens[name], self.pool.new.tokens[name]
            self.check(before + after, len(before), asked.prompt_ids)
        for name, number in self.read.items():
            self.check(self.pool.new.tokens[name], 0, PROMPTS[number])

    def check(self, got: tuple[int, ...], num_old: int, prompt_ids: tuple[int, ...]) -> None:
        weights = [OLD_WEIGHT] * num_old + [NEW_WEIGHT] * (len(got) - num_old)
        assert got == made_by(weights, prompt_ids, PARAMS), "KV of another ticket, or of nobody"


def settled(ticket: Ticket, num_blocks: int) -> Ticket | None:
    """The ticket for the blocks in transit, as its gateway passes it on."""
    return ticket.up_to(min(ticket.starts) + num_blocks) if num_blocks else None


TestTwoWriters = TwoWriters.TestCase
TestTwoWriters.settings = settings(max_examples=25, stateful_step_count=25)
