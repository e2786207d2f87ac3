"""Steps in flight change nothing but the time at which a client is told: the same tokens, and no block too early."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.values import FinishReason, GenerateRequest, KVLayout, LaneAddress, Ticket
from tests.unit.workers.harness import Adopting, Answer, Handing, ToyEngine, ask, by_hand
from tests.unit.workers.sync_pipeline import SyncPipeline, resolved
from workers.batch import Batch, Row, RowOutput, StepOutput
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition, Tick

PROMPTS = [tuple(range(n, n + length)) for n, length in ((0, 5), (0, 33), (1, 64), (0, 90), (2, 1), (0, 48))]
TICKET = Ticket(
    ticket_id="t",
    generation=1,
    lease_s=1.0,
    block_ids=(),
    num_cached_tokens=0,
    layout=KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32"),
    destination=LaneAddress(worker_id="d", incarnation=1, host="", port=0),
)


def rows_of(toy: ToyEngine) -> list[Row]:
    """Every row that is computed from now on."""
    seen: list[Row] = []
    run = toy.runner.run

    def watching(batch: Batch) -> StepOutput:
        seen.extend(batch.rows)
        return run(batch)

    toy.runner.run = watching  # type: ignore[method-assign]
    return seen


class Sorting(Handing):
    """Hands over the requests of some names, and lets go of them two ticks later."""

    def __init__(self) -> None:
        super().__init__(Disposition.KEEP)
        self.due: list[list[str]] = [[], []]

    def after_prefill(self, request: Request) -> Disposition:
        name = request.request_id.rpartition("-")[2]
        if name == "hold":
            self.due[-1].append(request.request_id)
            return Disposition.HOLD
        return Disposition.RELEASE if name == "release" else Disposition.KEEP

    def tick(self, now: float, num_in_flight: int) -> Tick:
        self.due.append([])
        return Tick(released=self.due.pop(0))

    def busy(self) -> bool:
        return any(self.due)


@st.composite
def workload(draw: st.DrawFn) -> GenerateRequest:
    prompt = draw(st.sampled_from(PROMPTS))
    max_tokens = draw(st.integers(0, 20))
    num_given = draw(st.integers(0, max(0, min(3, max_tokens - 1))))
    likely = by_hand(prompt, 12)
    return ask(
        draw(st.sampled_from(["keep", "keep", "hold", "release"])),
        prompt,
        max_tokens,
        output_ids=likely[:num_given],
        priority=draw(st.integers(0, 2)),
        ticket=draw(st.sampled_from([None, None, TICKET])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=draw(st.sampled_from([(), likely[3:4], likely[6:9]])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )


def told(answer: Answer) -> Any:
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs, answer.finish_reason


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 3), workload()), min_size=1, max_size=10),
    num_blocks=st.sampled_from([28, 200]),
)
def test_every_depth_tells_every_client_the_same(requests: list[tuple[int, GenerateRequest]], num_blocks: int) -> None:
    """However scarce blocks are, whoever comes when, ends when, is handed over or preempted."""
    answers = []
    for depth in (0, 1, 2):
        toy = ToyEngine(
            num_blocks=num_blocks,
            prefill_chunk=16,
            max_num_batched_tokens=48,
            max_num_seqs=6,
            role=Sorting(),
            depth=depth,
        )
        for index, (pause, request) in enumerate(requests):
            toy.submit(ask_again(request, f"{index}-{request.request_id}"))
            toy.step(pause)
        answers.append({name: told(answer) for name, answer in toy.finish().items()})
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def ask_again(request: GenerateRequest, name: str) -> GenerateRequest:
    changes = {field: getattr(request, field) for field in ("output_ids", "priority", "ticket", "sampling")}
    return GenerateRequest(request_id=name, prompt_ids=request.prompt_ids, **changes)


def test_a_step_is_told_of_after_the_next_one_was_launched() -> None:
    toy = ToyEngine(depth=1)
    toy.submit(ask("r", range(10), 3))
    assert [len(toy.step()) for _ in range(4)] == [0, 1, 1, 1]
    assert toy.answers["r"].token_ids == by_hand(range(10), 3)
    toy.engine.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_known_end_is_not_overrun(depth: int) -> None:
    toy = ToyEngine(depth=depth)
    rows = rows_of(toy)
    toy.serve(ask("r", range(10), 5))
    assert len(rows) == 5, "a prompt and four tokens, of which the fifth needs no position"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_is_noticed_depth_steps_later(depth: int) -> None:
    toy = ToyEngine(depth=depth)
    rows = rows_of(toy)
    answer = toy.serve(ask("r", range(10), 20, stop_token_ids=by_hand(range(10), 4)[3:]))["r"]
    assert (answer.token_ids, answer.finish_reason) == (by_hand(range(10), 4), FinishReason.STOP)
    assert len(rows) == 4 + depth


def test_an_aborted_requests_blocks_stay_until_its_step_ends() -> None:
    toy = ToyEngine(depth=1)
    toy.submit(ask("r", range(10), 20))
    toy.step(3)
    assert toy.engine.abort(["r"]) == 1
    assert toy.pool.num_free < 64
    assert toy.engine.has_work()
    assert toy.step() == []
    toy.engine.assert_idle()


def test_an_id_may_be_reused_while_its_step_is_in_flight() -> None:
    toy = ToyEngine(depth=1)
    toy.submit(ask("r", range(10), 20))
    toy.step(3)
    toy.engine.abort(["r"])
    toy.answers.clear()
    assert toy.serve(ask("r", range(30, 50), 6))["r"].token_ids == by_hand(range(30, 50), 6)


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    counts = []
    for depth in (0, 1):
        toy = ToyEngine(num_blocks=12, depth=depth)
        toy.serve(ask("a", range(10), 30), ask("b", range(50, 60), 30))
        assert toy.answers["b"].token_ids == by_hand(range(50, 60), 30)
        counts.append(toy.scheduler.num_preemptions)
    assert counts[0] == counts[1] > 0


def test_penalties_cost_nobody_a_step() -> None:
    toy = ToyEngine(depth=1)
    toy.submit(ask("plain", range(10), 9), ask("penalised", range(50, 60), 9, presence_penalty=0.5))
    toy.step(10)
    assert toy.answers["plain"].finish_reason is FinishReason.LENGTH
    assert toy.answers["penalised"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_penalties_count_every_token_so_far(depth: int) -> None:
    """Also that which is not known when the row is planned."""
    toy = ToyEngine(depth=depth)
    rows = rows_of(toy)
    answer = toy.serve(ask("r", range(10), 7, frequency_penalty=0.5))["r"]
    samples = [row.sample for row in rows if row.sample is not None]
    assert [sample.output_ids for sample in samples] == [answer.token_ids[:index] for index in range(7)]
    assert all(sample.prompt_ids == tuple(range(10)) for sample in samples)


def test_a_prompt_to_be_handed_over_is_not_decoded() -> None:
    toy = ToyEngine(role=Handing(Disposition.RELEASE), depth=1)
    rows = rows_of(toy)
    toy.serve(ask("r", range(10), 20, ticket=TICKET))
    assert len(rows) == 1


def test_adopted_blocks_are_decoded_at_any_depth() -> None:
    role = Adopting()
    toy = ToyEngine(role=role, depth=1)
    prompt = tuple(range(10))
    role.reserve(toy, "r", prompt)
    role.arrived.add("r")
    answer = toy.serve(ask("r", prompt, 8, output_ids=by_hand(prompt, 1)))["r"]
    assert answer.token_ids == by_hand(prompt, 8)[1:]


def test_a_plain_runner_is_a_pipeline() -> None:
    seen: list[Batch] = []

    class Counts:
        def run(self, batch: Batch) -> StepOutput:
            seen.append(batch)
            return StepOutput(rows=(RowOutput(token_ids=(len(seen),)),))

    steps = SyncPipeline(Counts())
    first = Row(request_id="r", token_ids=(7, 8), start=0, block_tables=((0,),))
    second = Row(request_id="r", token_ids=(), start=2, block_tables=((0,),), depends_on_row=0)
    assert (second.num_tokens, second.stop) == (1, 3)
    steps.launch(Batch(rows=(first,)))
    assert steps.launch(Batch(rows=(second,))).fetch().rows[0].token_ids == (2,)
    assert seen[1].rows[0].token_ids == (1,)


def test_a_row_that_follows_nothing_is_a_fault_of_ours() -> None:
    row = Row(request_id="r", token_ids=(), start=2, block_tables=((0,),), depends_on_row=0)
    with pytest.raises(AssertionError, match="request r depends on"):
        resolved(Batch(rows=(row,)), StepOutput(rows=(RowOutput(),)))
