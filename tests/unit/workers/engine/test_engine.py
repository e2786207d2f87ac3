"""The engine's contract; any order of events leaves it sound and its answers right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.events import EventCursor, Gap
from kvtransfer.hashing import Remembering
from protos.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    Misconfigured,
    Overloaded,
    TransferFailed,
    WorkerDraining,
)
from protos.values import BlockRemoved, BlockStored, Cleared, FinishReason, GenerateRequest, Hello, KVEvents
from tests.unit.workers.harness import VOCAB, Adopting, Answer, Handing, ToyEngine, ask, by_hand
from workers.batch import Batch, Row
from workers.engine.speed import EngineSpeed
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition, Tick
from workers.worker_config import SchedulerConfig

PROMPTS = [tuple(range(n, n + length)) for n, length in ((0, 5), (0, 33), (1, 64), (0, 90), (2, 1), (0, 48))]


class TestSubmit:
    @pytest.mark.parametrize(
        ("error", "param", "words", "request_"),
        [
            (InvalidRequest, "prompt", ["empty"], ask("r", [])),
            (InvalidRequest, "prompt", [str(VOCAB), f"0 to {VOCAB - 1}"], ask("r", [1, VOCAB, 2])),
            (InvalidRequest, "prompt", ["-3"], ask("r", [-3])),
            (InvalidRequest, "output_ids", ["5000"], ask("r", [1], output_ids=(5000,))),
            (InvalidRequest, "stop_token_ids", ["-1"], ask("r", [1], stop_token_ids=(-1,))),
            (InvalidRequest, "logit_bias", ["1000"], ask("r", [1], logit_bias=((1000, 1.0),))),
            (InvalidRequest, "label_token_ids", ["1000"], ask("r", [1], logprobs=0, label_token_ids=(1000,))),
            (InvalidRequest, "max_tokens", ["2", "3"], ask("r", [1], 2, output_ids=(1, 2, 3))),
            (InvalidRequest, "max_tokens", ["-1"], ask("r", [1], -1)),
            (ContextLengthExceeded, "prompt", ["100", "99"], ask("r", [1] * 100)),
            (ContextLengthExceeded, "prompt", ["101", "100"], ask("r", [1] * 100, 5, output_ids=(1,))),
        ],
    )
    def test_impossible_requests_are_refused_with_value_and_limit(
        self, error: type[BatonError], param: str, words: list[str], request_: Any
    ) -> None:
        toy = ToyEngine(max_model_len=100)
        with pytest.raises(error) as raised:
            toy.submit(request_)
        assert raised.value.param == param
        assert all(word in raised.value.message for word in words)
        toy.engine.assert_idle()

    def test_a_shared_prompt_is_refused_by_workers_it_does_not_fit(self) -> None:
        asked = replace(ask("r", ()), prompt_ids=Remembering((1, VOCAB, 2)))
        small, large = ToyEngine(), ToyEngine(vocab_size=VOCAB + 1)
        large.submit(asked)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=str(VOCAB)):
                small.submit(asked)

    def test_a_prompt_that_just_fits_is_served(self) -> None:
        assert ToyEngine(max_model_len=100).serve(ask("r", [1] * 99))["r"].token_ids == by_hand([1] * 99, 1)

    def test_a_prompt_larger_than_the_cache_is_refused(self) -> None:
        toy = ToyEngine(num_blocks=5)
        with pytest.raises(ContextLengthExceeded, match="20"):
            toy.submit(ask("r", [1] * 20))
        assert toy.serve(ask("s", [1] * 19))["s"].finish_reason is FinishReason.LENGTH

    def test_an_id_in_use_is_refused_and_free_again_after_the_end(self) -> None:
        toy = ToyEngine()
        toy.submit(ask("r", [1]))
        with pytest.raises(InvalidRequest, match="'r' is in use"):
            toy.submit(ask("r", [1]))
        toy.finish()
        toy.answers.clear()
        assert toy.serve(ask("r", [2], 3))["r"].token_ids == by_hand([2], 3)

    def test_a_full_queue_refuses_more_and_says_when_to_come_back(self) -> None:
        toy = ToyEngine(max_num_seqs=1, max_waiting=2)
        for name, token_id in (("cold", 5), ("warm", 6)):
            toy.serve(ask(name, [token_id] * 40, 1))
        toy.submit(ask("running", [1] * 10))
        toy.step()
        toy.submit(ask("first", [2] * 10), ask("second", [3] * 10))
        with pytest.raises(Overloaded, match="max_waiting") as raised:
            toy.submit(ask("third", [4]))
        assert raised.value.retry_after_s == 20 / 2 / 40  # tokens queued, a seat's share of them, tokens a second
        answers = toy.finish()
        assert {name: answers[name].token_ids for name in ("running", "first", "second")} == {
            "running": by_hand([1] * 10, 8),
            "first": by_hand([2] * 10, 8),
            "second": by_hand([3] * 10, 8),
        }

    def test_a_draining_engine_finishes_and_takes_no_more(self) -> None:
        toy = ToyEngine(max_num_seqs=1)
        toy.submit(ask("running", [1]), ask("waiting", [2]))
        toy.step()
        toy.engine.drain()
        with pytest.raises(WorkerDraining):
            toy.submit(ask("late", [3]))
        assert toy.engine.load().draining
        assert {name: answer.token_ids for name, answer in toy.finish().items()} == {
            "running": by_hand([1], 8),
            "waiting": by_hand([2], 8),
        }


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"prefill_chunk": 0}, "prefill_chunk"), ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_seqs")],
)
def test_settings_under_which_nothing_could_run_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(Misconfigured, match=word):
        SchedulerConfig(**({"max_model_len": 100, "vocab_size": VOCAB} | changes))


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("num_blocks", [256, 26], ids=["roomy", "tight"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
def test_tokens_do_not_depend_on_how_they_are_made(chunk: int, num_blocks: int, warm: bool, together: bool) -> None:
    toy = ToyEngine(num_blocks=num_blocks, prefill_chunk=chunk)
    requests = [ask(f"r{n}", prompt, 12) for n, prompt in enumerate(PROMPTS)]
    if warm:
        toy.serve(*(ask(f"warm{n}", prompt, 1) for n, prompt in enumerate(PROMPTS)))
    if together:
        toy.serve(*requests)
    else:
        for request in requests:
            toy.serve(request)
    for n, prompt in enumerate(PROMPTS):
        assert toy.answers[f"r{n}"].token_ids == by_hand(prompt, 12)
    assert (toy.scheduler.num_preemptions > 0) == (together and num_blocks == 26)


class TestRoles:
    def test_held_blocks_stay_until_the_role_releases_them(self) -> None:
        role = Handing(Disposition.HOLD)
        toy = ToyEngine(role=role)
        toy.submit(ask("r", range(20)))
        (update,) = toy.step()
        assert (update.finish_reason, update.token_ids) == (FinishReason.PREFILLED, by_hand(range(20), 1))
        assert role.held == ["r"]
        toy.step(3)
        assert toy.pool.num_free == 64 - 5
        assert toy.engine.has_work()
        role.next_tick = Tick(released=["r"])
        toy.finish()
        assert role.forgotten == []

    def test_an_aborted_transfer_keeps_blocks_while_they_are_read(self) -> None:
        role = Handing(Disposition.HOLD)
        toy = ToyEngine(role=role)
        toy.submit(ask("r", range(20)))
        toy.step()
        assert toy.engine.abort(["r"]) == 1
        assert role.forgotten == ["r"]
        assert toy.pool.num_free == 64 - 5
        role.next_tick = Tick(released=["r"])
        toy.finish()

    def test_a_released_request_is_gone_after_its_first_token(self) -> None:
        role = Handing(Disposition.RELEASE)
        toy = ToyEngine(role=role)
        answer = toy.serve(ask("r", range(20)))["r"]
        assert (answer.finish_reason, answer.token_ids) == (FinishReason.PREFILLED, by_hand(range(20), 1))
        assert role.forgotten == ["r"]

    def test_a_first_token_that_ends_the_request_is_not_handed_over(self) -> None:
        role = Handing(Disposition.HOLD)
        toy = ToyEngine(role=role)
        assert toy.serve(ask("r", range(20), 1))["r"].finish_reason is FinishReason.LENGTH
        assert role.held == []

    @pytest.mark.parametrize("prompt", [range(20), range(2000)], ids=["held", "running"])
    def test_a_roles_error_reaches_the_request(self, prompt: range) -> None:
        role = Handing(Disposition.HOLD)
        toy = ToyEngine(role=role, num_blocks=600, vocab_size=5000)
        toy.submit(ask("r", prompt))
        toy.step()
        role.next_tick = Tick(failed=[("r", TransferFailed("lane lost")), ("unknown", TransferFailed("late"))])
        (update,) = toy.step()
        assert update.finish_reason is FinishReason.ERROR
        assert update.error is not None
        assert (update.request_id, update.error.code) == ("r", "transfer_failed")
        toy.finish()

    def test_a_request_that_may_not_run_delays_no_other(self) -> None:
        class Barred(Handing):
            barred = True

            def admissible(self, request: Request, now: float) -> bool:
                return not self.barred or request.request_id != "barred"

        role = Barred(Disposition.KEEP)
        toy = ToyEngine(role=role)
        toy.submit(ask("barred", [1], 2), ask("free", [2], 2))
        assert [update.request_id for update in toy.step(3)] == ["free", "free"]
        assert toy.engine.has_work()
        role.barred = False
        assert toy.finish()["barred"].token_ids == by_hand([1], 2)

    def test_a_busy_role_keeps_the_engine_stepping(self) -> None:
        class Busy(Handing):
            def busy(self) -> bool:
                return True

        toy = ToyEngine(role=Busy(Disposition.KEEP))
        assert toy.engine.has_work()
        assert (toy.step(), toy.engine.num_steps) == ([], 0)


class TestLoad:
    def test_it_counts_running_and_waiting_requests(self) -> None:
        toy = ToyEngine(max_num_seqs=2, prefill_chunk=8)
        toy.submit(ask("a", range(20)), ask("b", [500]), ask("c", range(600, 630)))
        toy.step()
        load = toy.engine.load()
        assert (load.step, load.num_running, load.num_waiting) == (1, 2, 1)
        assert load.queued_prefill_tokens == 12 + 30
        assert (load.num_blocks, load.num_free_blocks) == (64, 64 - 5 - 1)

    def test_cached_or_computing_tokens_are_not_queued(self) -> None:
        toy = ToyEngine(max_num_seqs=1, prefill_chunk=8)
        toy.submit(ask("first", range(20)), ask("same", range(20)))
        toy.step()
        toy.submit(ask("sibling", range(22)))
        assert toy.engine.load().queued_prefill_tokens == 12 + 20 + 2

    def test_cached_blocks_are_free_blocks(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("r", range(40)))
        assert toy.engine.load().num_free_blocks == 64

    def test_pace_is_measured_with_the_clock_it_was_given(self) -> None:
        toy = ToyEngine(prefill_chunk=50)
        assert (toy.engine.load().prefill_tokens_per_s, toy.engine.load().decode_step_s) == (0.0, 0.0)
        toy.serve(ask("r", range(100), 10))
        load = toy.engine.load()
        assert load.prefill_tokens_per_s == pytest.approx(50)
        assert load.decode_step_s == pytest.approx(1.0)


def test_a_mixed_step_counts_for_both_kinds_of_work() -> None:
    speed = EngineSpeed()
    prompt, decode = (Row(request_id="r", token_ids=(1,) * n, start=0, block_tables=((),)) for n in (90, 1))
    speed.observe(Batch(rows=(decode,) * 10 + (prompt,)), 60.0)
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (0.0, 0.0), "the first step is cold"
    speed.observe(Batch(rows=(decode,) * 10 + (prompt,)), 2.0)
    assert speed.prefill_tokens_per_s == pytest.approx(90 / 1.8)
    assert speed.decode_step_s == pytest.approx(2.0)
    speed.observe(Batch(rows=(decode,)), 1.0)
    assert speed.prefill_tokens_per_s == pytest.approx(90 / 1.8)
    assert 1.0 < speed.decode_step_s < 1.5


def test_a_few_tokens_of_a_prompt_say_nothing_of_long_ones() -> None:
    speed = EngineSpeed()
    short, long = (Row(request_id="r", token_ids=(1,) * n, start=0, block_tables=((),)) for n in (10, 1000))
    for _ in range(3):
        speed.observe(Batch(rows=(short,)), 0.1)
    assert speed.prefill_tokens_per_s == 0.0
    speed.observe(Batch(rows=(long,)), 0.2)
    assert speed.prefill_tokens_per_s == pytest.approx(5000)


def mirror(known: set[bytes], message: KVEvents, cursor: EventCursor) -> set[bytes]:
    fresh = cursor.accept(message)
    assert not isinstance(fresh, Gap)
    for event in fresh:
        match event:
            case Cleared():
                known = set()
            case BlockStored():
                known = known | set(event.hashes)
            case BlockRemoved():
                known = known - set(event.hashes)
    return known


def in_cache(toy: ToyEngine) -> set[bytes]:
    return {block_hash for chain in toy.pool.snapshot() for block_hash in chain.hashes}


class TestEvents:
    def test_a_chunk_of_a_prompt_is_one_event(self) -> None:
        toy = ToyEngine(prefill_chunk=40)
        toy.submit(ask("r", range(100)))
        toy.step()
        events = toy.engine.drain_events()
        assert events is not None
        assert [len(event.hashes) for event in events.events if isinstance(event, BlockStored)] == [10]
        assert toy.engine.drain_events() is None

    def test_a_reconnecting_gateway_gets_a_snapshot(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("a", range(100), 1))
        cursor = EventCursor()
        hashes = mirror(set(), toy.engine.events_since(Hello(gateway_id="g")), cursor)
        assert hashes == in_cache(toy)
        toy.serve(ask("b", range(500, 600), 1))
        again = toy.engine.events_since(Hello(gateway_id="g", incarnation=1, next_seq=cursor.next_seq))
        assert not again.snapshot
        assert mirror(hashes, again, cursor) == in_cache(toy)

    def test_a_log_that_is_too_short_is_made_up_for_by_a_snapshot(self) -> None:
        toy = ToyEngine(log_capacity=1)
        cursor = EventCursor()
        toy.serve(ask("a", range(100), 1), ask("b", range(500, 600), 1))
        for message in (toy.engine.events_since(Hello(gateway_id="g")), toy.engine.drain_events()):
            assert message is not None
            assert message.snapshot
        assert message is not None
        assert mirror(set(), message, cursor) == in_cache(toy)


class Chaos(Adopting):
    """Hands some requests over, keeps others, adopts some; lets go of held ones two ticks later, or fails them."""

    def __init__(self) -> None:
        super().__init__()
        self.disposition: dict[str, Disposition] = {}
        self.held: dict[str, float] = {}
        self.prefilled: list[str] = []

    def after_prefill(self, request: Request) -> Disposition:
        self.prefilled.append(request.request_id)
        disposition = self.disposition[request.request_id]
        if disposition is Disposition.HOLD:
            self.held[request.request_id] = float("inf")
        return disposition

    def tick(self, now: float, num_in_flight: int) -> Tick:
        due = [request_id for request_id, until_s in self.held.items() if until_s <= now]
        self.held = {
            request_id: min(until_s, now + 2) for request_id, until_s in self.held.items() if request_id not in due
        }
        return Tick(released=due)

    def busy(self) -> bool:
        return bool(self.held)


class EngineMachine(RuleBasedStateMachine):
    """Clients come and go and the engine steps, in any order, in a pool that is too small for all of them."""

    @initialize(depth=st.integers(0, 2))
    def start(self, depth: int) -> None:
        self.role = Chaos()
        self.depth = depth
        self.toy = ToyEngine(
            num_blocks=28, prefill_chunk=16, max_num_batched_tokens=48, max_num_seqs=6, role=self.role, depth=depth
        )
        self.asked: dict[str, GenerateRequest] = {}
        self.aborted: set[str] = set()
        self.cursor = EventCursor()
        self.known: set[bytes] = set()

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        num_given=st.integers(0, 3),
        scores=st.booleans(),
        penalty=st.sampled_from([0.0, 1.0]),
        stop=st.none() | st.integers(0, 8),
        disposition=st.sampled_from([Disposition.KEEP, *Disposition]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        priority: int,
        num_given: int,
        scores: bool,
        penalty: float,
        stop: int | None,
        disposition: Disposition,
    ) -> None:
        """The toy model knows nothing of penalties, but the scheduler does."""
        output = by_hand(prompt, min(num_given, max_tokens - 1))
        changes = {
            "priority": priority,
            "output_ids": output,
            "prompt_logprobs": 0 if scores else None,
            "presence_penalty": penalty,
            "stop_token_ids": () if stop is None else by_hand(prompt, 9)[stop : stop + 1],
        }
        request = ask(f"r{len(self.asked)}", prompt, max_tokens, **changes)
        self._submit(request, disposition)

    @rule(prompt=st.sampled_from(PROMPTS), max_tokens=st.integers(2, 20))
    def reserve(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        request = ask(f"r{len(self.asked)}", prompt, max_tokens, output_ids=by_hand(prompt, 1))
        if not self.toy.scheduler.blocked and self.role.reserve(self.toy, request.request_id, prompt):
            self._submit(request, Disposition.KEEP)

    @rule()
    def arrive(self) -> None:
        self.role.arrived |= self.role.blocks.keys()

    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        """Between two steps, or between a plan and its apply."""
        if not self.asked:
            return
        gone = data.draw(st.lists(st.sampled_from(sorted(self.asked)), max_size=3))
        batch = self.toy.scheduler.plan(self.toy.now) if in_flight and self.depth == 0 else None
        self.toy.engine.abort(gone)
        self.aborted |= {name for name in gone if self.toy.answers[name].finish_reason is None}
        if batch is not None:
            for update in self.toy.scheduler.apply(batch, self.toy.runner.run(batch)):
                self.toy.answers[update.request_id].add(update)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        self.toy.step(num_steps)

    @rule()
    def clear(self) -> None:
        self.toy.pool.clear()

    @invariant()
    def sound(self) -> None:
        self.toy.engine.check_integrity(self.toy.reserved_ids())
        events = self.toy.engine.drain_events()
        if events is not None:
            self.known = mirror(self.known, events, self.cursor)
        assert self.known == in_cache(self.toy)

    def teardown(self) -> None:
        if not hasattr(self, "toy"):
            return  # hypothesis gave up before it began
        self.arrive()
        answers = self.toy.finish()
        assert len(self.role.prefilled) == len(set(self.role.prefilled)), "handed over twice"
        for name, request in self.asked.items():
            self._check(request, answers[name])

    def _submit(self, request: GenerateRequest, disposition: Disposition) -> None:
        self.asked[request.request_id] = request
        self.role.disposition[request.request_id] = disposition
        self.toy.submit(request)

    def _check(self, request: GenerateRequest, answer: Answer) -> None:
        num_given = len(request.output_ids)
        expected = by_hand(request.prompt_ids, request.sampling.max_tokens)[num_given:]
        ends = [n for n, token_id in enumerate(expected, 1) if token_id in request.sampling.stop_token_ids]
        expected = expected[: ends[0]] if ends else expected
        if request.request_id in self.aborted:
            assert answer.token_ids == expected[: len(answer.token_ids)]
            return
        assert answer.token_ids == (expected[:1] if answer.finish_reason is FinishReason.PREFILLED else expected)
        scored = request.sampling.prompt_logprobs is not None and not num_given
        told = tuple(entry.chosen.token_id for entry in answer.prompt_logprobs)
        assert told == (request.prompt_ids[1:] if scored else ())


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)
