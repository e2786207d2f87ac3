"""A proposer that costs more than it spares is paused, and tried again. Steps take 10 ms, whatever they verify."""

from __future__ import annotations

from collections.abc import Sequence as Many

from protos.values import SamplingParams, SpeculationParams
from tests.contract.test_proposers import Sequence
from tests.unit.workers.speculation.proposers.test_head_proposer import BLOCK, CountingHead
from tests.unit.workers.speculation.test_queries import Counting
from workers.batch import Batch, Row, Sample
from workers.speculation.payoff import EARLY_STEPS, MOST_PAUSE_STEPS, PAUSE_STEPS, TRIAL_STEPS, WARM_UP_STEPS
from workers.speculation.proposer import ComputedRow, Draft, DraftQuery, ProposerNeeds
from workers.speculation.proposers.draft_model_proposer import DraftLimits
from workers.speculation.proposers.head_proposer import HeadProposer
from workers.speculation.speculation import Speculation

STEP_S = 0.010


class Entries(Counting):
    """A head: each step takes it `each_s`, and it drafts two tokens."""

    name = "eagle"
    needs = ProposerNeeds(every_step=True, every_row=True)

    def __init__(self, each_s: float) -> None:
        super().__init__()
        self.draft = Draft(token_ids=(7, 8), source="eagle")
        self.each_s = each_s
        self.num_skipped = 0
        self._taken_s = 0.0

    def computed(self, rows: Many[ComputedRow]) -> None:
        self._taken_s += self.each_s

    def skipped(self, rows: Many[ComputedRow]) -> None:
        self.num_skipped += 1

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def take_seconds(self) -> float:
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s


class Steps:
    """Steps of one sequence. `right`: whether its drafts are."""

    def __init__(self, proposer: Entries) -> None:
        self.speculation = Speculation([proposer], max_drafts=2)
        self.speculation.begin(Sequence(request_id="r", prompt_ids=(1, 2, 3)), SpeculationParams())
        self.right = False

    def run(self, num_steps: int = 1, *, num_prompt: int = 0) -> int:
        """Runs steps with so many prompt tokens beside each. Returns the number of drafts."""
        total = 0
        for _ in range(num_steps):
            sizes = {"num_rows": 1, "num_positions": 1 + num_prompt, "budget": 100}
            drafts = self.speculation.drafts([("r", 20)], **sizes).get("r", ())
            total += len(drafts)
            sample = Sample(params=SamplingParams(), index=0)
            rows = [Row(request_id="r", token_ids=(5,), start=9, block_tables=((0,),), sample=sample, draft_ids=drafts)]
            if num_prompt:
                rows.append(Row(request_id="p", token_ids=(5,) * num_prompt, start=0, block_tables=((0,),)))
            self.speculation.take_seconds()
            self.speculation.observe(Batch(rows=tuple(rows)), STEP_S)
            self.speculation.computed([])
            self.speculation.applied("r", drafts, 1 + len(drafts) * self.right)
        return total

    @property
    def is_paused(self) -> bool:
        return bool(self.speculation.load().paused)

    def until_paused(self) -> int:
        num_steps = 0
        while not self.is_paused:
            self.run()
            num_steps += 1
        return num_steps


def test_a_costly_head_is_paused_and_computes_nothing() -> None:
    head = Entries(STEP_S)
    steps = Steps(head)
    assert steps.until_paused() == WARM_UP_STEPS + EARLY_STEPS
    num_calls, num_skipped = head.num_calls, head.num_skipped
    (paused,) = steps.speculation.load().paused
    assert (paused.source, paused.num_steps) == ("eagle", PAUSE_STEPS)
    assert paused.spent_s > 0.9 * EARLY_STEPS * STEP_S
    assert paused.spared_s == 0
    assert steps.run(PAUSE_STEPS - 1) == 0
    assert (head.num_calls, head.num_skipped) == (num_calls, num_skipped + PAUSE_STEPS - 1)
    assert steps.is_paused


def test_a_head_that_costs_little_is_judged_after_a_whole_trial() -> None:
    steps = Steps(Entries(0.1 * STEP_S))
    assert steps.until_paused() == WARM_UP_STEPS + TRIAL_STEPS


def test_a_noisy_loss_does_not_pause_a_head() -> None:
    steps = Steps(Entries(0.01 * STEP_S))
    steps.run(10 * TRIAL_STEPS)
    assert not steps.is_paused


def test_a_head_that_pays_again_drafts_from_its_first_step() -> None:
    steps = Steps(Entries(STEP_S))
    steps.until_paused()
    steps.run(PAUSE_STEPS - 1)
    steps.right = True
    steps.run()
    assert not steps.is_paused
    assert steps.run(10) == 20, "neither a sequence without chosen drafts nor earlier rejections hold it back"
    steps.run(20 * TRIAL_STEPS)
    assert not steps.is_paused


def test_repeated_pauses_grow_up_to_a_limit() -> None:
    steps = Steps(Entries(STEP_S))
    lengths = []
    for _ in range(6):
        steps.until_paused()
        (paused,) = steps.speculation.load().paused
        lengths.append(paused.num_steps)
        while steps.is_paused:
            steps.speculation.observe(Batch(rows=()), STEP_S)
    assert lengths == [2048, 4096, 8192, 16384, 32768, MOST_PAUSE_STEPS]
    steps.right = True
    steps.run(WARM_UP_STEPS + TRIAL_STEPS)
    steps.right = False
    steps.until_paused()
    assert steps.speculation.load().paused[0].num_steps == PAUSE_STEPS


def test_steps_beside_prompts_and_behind_them_do_not_count() -> None:
    head = Entries(0.0)
    steps = Steps(head)
    for _ in range(2 * TRIAL_STEPS):
        head.each_s = 10 * STEP_S
        steps.run(num_prompt=64)
        head.each_s = 0.0
        steps.run()
        steps.run()
    assert not steps.is_paused


def test_drafts_beside_prompts_do_not_pay_for_others() -> None:
    head = Entries(1.3 * STEP_S)
    steps = Steps(head)
    for _ in range(2 * TRIAL_STEPS):
        steps.run(num_prompt=64)
        steps.right = True
        steps.run()
        steps.right = False
        steps.run(2)
    assert steps.is_paused


def test_a_sequences_other_proposers_draft_during_a_pause() -> None:
    head, other = Entries(STEP_S), Counting()
    other.draft = Draft(token_ids=(3,), source="counting")
    steps = Steps(head)
    steps.speculation.add(other)
    steps.speculation.begin(Sequence(request_id="r", prompt_ids=(1, 2, 3)), SpeculationParams())
    steps.until_paused()
    num_calls = other.num_calls
    steps.run(50)
    assert other.num_calls > num_calls


def row_of(sequence: Sequence, start: int, stop: int) -> ComputedRow:
    tokens = (*sequence.prompt_ids, *sequence.output_ids)
    return ComputedRow(
        request_id=sequence.request_id,
        start=start,
        token_ids=tokens[start:stop],
        next_id=tokens[stop],
        first_hidden=0,
        pages=tuple(sequence.tables[0][: -(-stop // BLOCK)]),
        prompt_len=len(sequence.prompt_ids),
    )


def test_a_head_resumes_after_pages_without_its_kv() -> None:
    limits = DraftLimits(block_size=BLOCK, num_pages=20, scratch_pages=2, chunk=64, max_len=64, vocab_size=99)
    runner, headless = CountingHead(), set[int]()
    head = HeadProposer("eagle", runner, limits, clock=lambda: 0.0, headless=headless)
    sequence = Sequence(request_id="a", prompt_ids=tuple(range(1, 7)), output_ids=[7])
    sequence.tables = [[3, 5, 7, 9]]
    head.begin(sequence)
    query = [DraftQuery(request_id="a", max_drafts=2)]
    head.computed([row_of(sequence, 0, 6)])
    assert [draft.token_ids for draft in head.propose(query)] == [(8, 9)]
    sequence.output_ids += [8]
    head.skipped([row_of(sequence, 6, 7)])
    assert headless == {5}
    assert [draft.token_ids for draft in head.propose(query)] == [()]
    sequence.output_ids += [9]
    head.computed([row_of(sequence, 7, 8)])
    assert [draft.token_ids for draft in head.propose(query)] == [()], "position 7 stands in a page without entries"
    sequence.output_ids += [10]
    head.computed([row_of(sequence, 8, 9)])
    assert [draft.token_ids for draft in head.propose(query)] == [(11, 12)]
