"""When proposers are queried: often where drafts were chosen, seldom where none was, never where none could pay."""

from __future__ import annotations

from collections.abc import Sequence as Many

from protos.values import SpeculationParams
from tests.contract.test_proposers import Sequence
from workers.speculation.cost import StepSeconds
from workers.speculation.proposer import NO_DRAFT, ComputedRow, Draft, DraftQuery, ProposerNeeds, SpeculatedSequence
from workers.speculation.speculation import Speculation


class Counting:
    """Counts its calls."""

    name = "counting"
    needs = ProposerNeeds()

    def __init__(self) -> None:
        self.draft = NO_DRAFT
        self.num_calls = 0

    def begin(self, sequence: SpeculatedSequence) -> None: ...

    def computed(self, rows: Many[ComputedRow]) -> None: ...

    def propose(self, queries: Many[DraftQuery]) -> Many[Draft]:
        self.num_calls += 1
        return [self.draft for _ in queries]

    def end(self, request_id: str) -> None: ...

    def __len__(self) -> int:
        return 0


def speculating(proposer: Counting, cost: StepSeconds | None = None) -> Speculation:
    speculation = Speculation([proposer], max_drafts=4, cost=cost)
    speculation.begin(Sequence(request_id="r", prompt_ids=(1, 2, 3)), SpeculationParams())
    return speculation


def step(speculation: Speculation, num_rows: int = 1) -> int:
    """The number of drafts of the next step."""
    drafts = speculation.drafts([("r", 20)], num_rows=num_rows, num_positions=num_rows, budget=100).get("r", ())
    speculation.applied("r", drafts, 1 + len(drafts))
    return len(drafts)


def test_a_sequence_without_drafts_is_queried_less() -> None:
    proposer = Counting()
    speculation = speculating(proposer)
    assert [step(speculation) for _ in range(200)] == [0] * 200
    assert 60 < proposer.num_calls < 80
    proposer.draft = Draft(token_ids=(7, 8), source="counting", evidence=3)
    assert sum(step(speculation) > 0 for _ in range(4)) >= 1
    num_calls = proposer.num_calls
    assert [step(speculation) for _ in range(20)] == [2] * 20
    assert proposer.num_calls == num_calls + 20


def test_steps_without_room_for_drafts_do_not_count() -> None:
    proposer = Counting()
    speculation = speculating(proposer)
    for _ in range(100):
        assert speculation.drafts([("r", 20)], num_rows=1, num_positions=1, budget=0) == {}
    assert proposer.num_calls == 0
    assert [step(speculation) for _ in range(10)] == [0] * 10
    assert proposer.num_calls == 10


def test_nothing_is_queried_if_right_drafts_would_not_pay() -> None:
    """In a full batch each position costs as much as a row."""
    full = StepSeconds()
    for _ in range(20):
        for num_positions in (40, 44, 48, 64, 80):
            full.observe(num_positions, 0.001 * num_positions)
    proposer = Counting()
    proposer.draft = Draft(token_ids=(7, 8), source="counting", evidence=3)
    assert step(speculating(proposer, full), num_rows=40) == 0
    assert proposer.num_calls == 0
    assert step(speculating(proposer), num_rows=40) == 2


def test_sequences_in_flight_are_queried_together() -> None:
    proposer = Counting()
    speculation = Speculation([proposer], max_drafts=4)
    for name in "ab":
        speculation.begin(Sequence(request_id=name, prompt_ids=(1, 2, 3)), SpeculationParams())
    for _ in range(200):
        assert speculation.promising(("a", "b", "unknown"), num_rows=2) == set()
    assert 60 < proposer.num_calls < 80


def test_no_sequence_sits_out_a_step_for_drafts_that_do_not_pay() -> None:
    full = StepSeconds()
    for _ in range(20):
        for num_positions in (40, 44, 48, 64, 80):
            full.observe(num_positions, 0.001 * num_positions)
    proposer = Counting()
    proposer.draft = Draft(token_ids=(7, 8, 9), source="counting", evidence=3)
    speculation = speculating(proposer, full)
    assert speculation.promising(("r",), num_rows=40) == set()
    assert proposer.num_calls == 0


def test_a_sequence_that_sits_out_a_step_is_queried_behind_it() -> None:
    """Also one that is queried in every fourth step only."""
    proposer = Counting()
    speculation = speculating(proposer)
    assert [step(speculation) for _ in range(101)] == [0] * 101
    proposer.draft = Draft(token_ids=(7, 8, 9, 10), source="counting", evidence=3)
    sat_out = [step(speculation) for _ in range(8) if speculation.promising(("r",), num_rows=1)]
    assert sat_out
    assert all(sat_out)
