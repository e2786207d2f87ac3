"""An engine whose rows have drafts: the answers are those without, whatever is drafted, and only steps are saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.speculation.known_drafter import KnownAnswers
from protos.values import FinishReason, GenerateRequest, SpeculationParams
from tests.unit.workers.grammar.test_grammars import EOS, Summing
from tests.unit.workers.harness import BLOCK, VOCAB, Answer, ToyEngine, ask, by_hand
from workers.speculation.cost import StepSeconds
from workers.speculation.proposer import ComputedRow, Draft, DraftQuery
from workers.speculation.proposers.ngram import NgramProposer
from workers.speculation.proposers.prediction import PredictionProposer
from workers.speculation.speculation import Speculation


def requests() -> list[GenerateRequest]:
    """Requests of every kind that a row depends on."""
    free = [ask(f"free {i}", range(i, i + 6), 30, temperature=float(i % 2), seed=i) for i in range(4)]
    bound = [ask(f"bound {i}", range(i, i + 6), 20, grammar="sums", seed=i, temperature=1.0) for i in range(3)]
    ends = by_hand(range(60, 66), 20)
    stopped = ask("stopped", range(60, 66), 20, stop_token_ids=(ends[9],), min_tokens=4)
    least = ask("least", range(60, 66), 20, stop_token_ids=(ends[2], ends[6]), min_tokens=5, logprobs=2)
    return [*free, *bound, stopped, least, ask("one", range(70, 75), 1), ask("none", range(70, 75), 0)]


def speculating(right: float, answers: dict[str, Answer], max_drafts: int = 5) -> Speculation:
    continuations: dict[str, Sequence[int]] = {name: answer.token_ids for name, answer in answers.items()}
    return Speculation(
        [KnownAnswers(continuations, right=right, vocab_size=VOCAB)], max_drafts=max_drafts, cost=NoCost()
    )


class NoCost(StepSeconds):
    """All steps take as long: every draft is verified."""

    def observe(self, num_positions: int, elapsed_s: float) -> None: ...


class TenMs(NoCost):
    """All steps take 10 ms."""

    def seconds(self, num_positions: int) -> float:
        return 0.010


def without_counts(answers: dict[str, Answer]) -> dict[str, Any]:
    return {
        name: (output.token_ids, output.logprobs, output.finish_reason, output.error and output.error.message)
        for name, output in answers.items()
    }


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [128, 24])
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
def test_drafts_change_no_answer(depth: int, num_blocks: int, right: float) -> None:
    plain = ToyEngine(grammars=Summing(), eos_ids=(EOS,)).serve(*requests())
    speculation = speculating(right, plain)
    toy = ToyEngine(grammars=Summing(), eos_ids=(EOS,), depth=depth, num_blocks=num_blocks, speculation=speculation)
    assert without_counts(toy.serve(*requests())) == without_counts(plain)
    assert toy.scheduler.num_preemptions > 0 or num_blocks == 128
    assert speculation.counts.num_drafted > 0
    assert (speculation.counts.num_accepted > 0) == (right > 0)


def test_right_drafts_save_steps_and_are_counted_by_position() -> None:
    prompt = (3, 1, 4, 1, 5)
    plain = {"r": Answer(token_ids=by_hand(prompt, 25))}
    speculation = speculating(1.0, plain, max_drafts=3)
    toy = ToyEngine(speculation=speculation)
    assert toy.serve(ask("r", prompt, 25))["r"].token_ids == plain["r"].token_ids
    assert toy.engine.num_steps == 1 + 24 // 4
    load = toy.engine.load().speculation
    assert load is not None
    assert (load.num_rows, load.num_tokens, load.num_drafted, load.num_accepted) == (7, 25, 18, 18)
    (source,) = load.sources
    assert (source.source, source.drafted_at, source.accepted_at) == ("known", (6, 6, 6), (6, 6, 6))
    assert toy.engine.load().decode_step_s < toy.engine.speed.decode_step_s


def test_no_block_with_an_unverified_token_is_reported() -> None:
    prompt = (3, 1, 4, 1, 5)
    plain = ToyEngine()
    plain.serve(ask("r", prompt, 25))
    toy = ToyEngine(speculation=speculating(0.5, plain.answers))
    toy.serve(ask("r", prompt, 25))

    def stored(engine: ToyEngine) -> list[bytes]:
        events = engine.engine.drain_events()
        assert events is not None
        return [digest for event in events.events for digest in getattr(event, "hashes", ())]

    assert stored(toy) == stored(plain)


def test_drafts_preempt_nothing_and_use_spare_blocks() -> None:
    """Two sequences fill the cache but for one block each."""
    plain = ToyEngine().serve(ask("a", range(5), 20), ask("b", range(9, 14), 20))
    num_blocks = 2 * -(-25 // BLOCK)
    toy = ToyEngine(num_blocks=num_blocks, speculation=speculating(1.0, plain))
    assert without_counts(toy.serve(ask("a", range(5), 20), ask("b", range(9, 14), 20))) == without_counts(plain)
    assert toy.scheduler.num_preemptions == 0


def test_a_request_may_turn_it_off_or_bound_it() -> None:
    off, single = SpeculationParams(mode="off"), SpeculationParams(max_drafts=1)
    plain = ToyEngine().serve(ask("r", range(5), 20))
    for params, num_steps in ((off, 20), (single, 1 + 10)):
        toy = ToyEngine(speculation=speculating(1.0, plain))
        assert toy.serve(ask("r", range(5), 20, speculation=params))["r"].token_ids == plain["r"].token_ids
        assert toy.engine.num_steps == num_steps


def test_a_prediction_is_followed_and_counted() -> None:
    """The client expects the answer with one token changed."""
    plain = by_hand(range(5), 20)
    predicted = (*plain[:8], (plain[8] + 1) % VOCAB, *plain[9:])
    speculation = Speculation([PredictionProposer(), NgramProposer()], max_drafts=4)
    toy = ToyEngine(speculation=speculation)
    toy.submit(ask("r", range(5), 20, speculation=SpeculationParams(prediction_ids=predicted)))
    updates = []
    while toy.engine.has_work():
        updates += toy.step()
    assert toy.answers["r"].token_ids == plain
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert sum(update.num_predicted for update in updates) > 10
    assert sum(update.num_mispredicted for update in updates) > 0
    assert toy.engine.num_steps < 12


def test_spared_seconds_are_those_of_steps_without_drafts() -> None:
    """A step takes 10 ms and 1 ms a draft; a row brings three drafts and a token: it spares three steps."""
    cost = StepSeconds()
    for num_positions in range(1, 6):
        for _ in range(50):
            cost.observe(num_positions, 0.009 + 0.001 * num_positions)
    plain = ToyEngine().serve(ask("r", range(5), 21))
    continuations: dict[str, Sequence[int]] = {name: answer.token_ids for name, answer in plain.items()}
    proposer = KnownAnswers(continuations, right=1.0, vocab_size=VOCAB)
    speculation = Speculation([proposer], max_drafts=3, cost=cost)
    observe = speculation.observe
    timed: Any = lambda batch, _: observe(batch, 0.009 + 0.001 * batch.num_tokens)  # noqa: E731
    speculation.observe = timed  # type: ignore[method-assign]
    ToyEngine(speculation=speculation).serve(ask("r", range(5), 21))
    load = speculation.load()
    assert load.spared_s == pytest.approx(15 * 0.010, rel=0.05)
    assert load.spent_s == pytest.approx(5 * 0.003, rel=0.2)


class Slow(KnownAnswers):
    """Drafts that take 200 s a call."""

    spent_s = 0.0

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        self.spent_s += 200.0
        return super().propose(queries)

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def skipped(self, rows: Sequence[ComputedRow]) -> None: ...

    def take_seconds(self) -> float:
        taken_s, self.spent_s = self.spent_s, 0.0
        return taken_s


def test_proposers_time_counts_as_steps_and_as_spent() -> None:
    """Each step takes a second of the engine's clock, and brings three tokens."""
    plain = ToyEngine().serve(ask("r", range(5), 19))
    continuations: dict[str, Sequence[int]] = {name: answer.token_ids for name, answer in plain.items()}
    speculation = Speculation([Slow(continuations, right=1.0, vocab_size=VOCAB)], max_drafts=2, cost=NoCost())
    toy = ToyEngine(speculation=speculation)
    toy.serve(ask("r", range(5), 19))
    assert toy.engine.speed.decode_step_s == pytest.approx(201, rel=0.02)  # of one, unless drafting counts
    assert speculation.load().spent_s >= 6 * 200


def test_drafts_beside_a_prompt_are_not_credited() -> None:
    plain = ToyEngine().serve(ask("r", range(5), 21))
    continuations: dict[str, Sequence[int]] = {name: answer.token_ids for name, answer in plain.items()}
    speculation = Speculation([KnownAnswers(continuations, right=1.0, vocab_size=VOCAB)], max_drafts=3, cost=TenMs())
    toy = ToyEngine(speculation=speculation)
    toy.submit(ask("r", range(5), 21))
    toy.step(3)
    spared_s, num_accepted = speculation.counts.spared_s, speculation.counts.num_accepted
    assert spared_s > 0
    toy.submit(ask("other", range(9), 1))
    toy.step()
    assert speculation.counts.num_accepted > num_accepted
    assert speculation.counts.spared_s == spared_s


def test_updates_of_one_token_stay_plain_and_no_count_is_lost() -> None:
    plain = ToyEngine().serve(ask("r", range(5), 30))
    toy = ToyEngine(speculation=speculating(0.5, plain))
    toy.submit(ask("r", range(5), 30))
    updates = []
    while toy.engine.has_work():
        updates += toy.step()
    load = toy.engine.load().speculation
    assert load is not None
    assert sum(update.num_drafted for update in updates) == load.num_drafted > 0
    assert sum(update.num_accepted for update in updates) == load.num_accepted > 0
    assert all(update.is_plain for update in updates[1:-1] if len(update.token_ids) == 1)


@pytest.mark.parametrize(("sources", "drafts"), [((), True), (("known", "ngram"), True), (("ngram",), False)])
def test_only_named_sources_draft(sources: tuple[str, ...], *, drafts: bool) -> None:
    plain = ToyEngine().serve(ask("r", range(5), 20))
    speculation = speculating(1.0, plain)
    assert (
        ToyEngine(speculation=speculation)
        .serve(ask("r", range(5), 20, speculation=SpeculationParams(sources=sources)))["r"]
        .token_ids
        == plain["r"].token_ids
    )
    assert (speculation.counts.num_drafted > 0) == drafts


def test_an_abort_leaves_nothing() -> None:
    plain = ToyEngine().serve(ask("r", range(5), 20))
    toy = ToyEngine(speculation=speculating(1.0, plain))
    toy.submit(ask("r", range(5), 20))
    toy.step(2)
    toy.engine.abort(["r"])
    toy.finish()
