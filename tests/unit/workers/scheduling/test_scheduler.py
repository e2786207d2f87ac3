"""One test per rule, driven through the engine with the toy model: what a client would notice."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.hashing import chain_hashes
from protos.values import FinishReason, SamplingParams, SequenceUpdate
from tests.unit.workers.harness import BLOCK, WEIGHT, Adopting, ToyEngine, ask, by_hand
from workers.batch import Batch, RowOutput, StepOutput

LONG = tuple(range(100))


def told(updates: list[SequenceUpdate]) -> dict[str, int]:
    """How many tokens each request got."""
    return {update.request_id: len(update.token_ids) for update in updates}


class Peek:
    """Keeps the batches a runner is given."""

    def __init__(self, toy: ToyEngine) -> None:
        self.batches: list[Batch] = []
        run = toy.runner.run

        def recording(batch: Batch) -> StepOutput:
            self.batches.append(batch)
            return run(batch)

        toy.runner.run = recording  # type: ignore[method-assign]

    def shape(self, index: int = -1) -> dict[str, int]:
        return {row.request_id: len(row.token_ids) for row in self.batches[index].rows}


class TestSteps:
    def test_decodes_go_on_while_a_long_prompt_is_read(self) -> None:
        toy = ToyEngine(prefill_chunk=16)
        toy.submit(ask("short", [1, 2, 3], max_tokens=20))
        toy.step()
        toy.submit(ask("long", LONG))
        for _ in range(6):
            assert told(toy.step()) == {"short": 1}
        assert told(toy.step()) == {"short": 1, "long": 1}
        assert toy.finish()["long"].token_ids == by_hand(LONG, 8)

    def test_a_step_keeps_to_its_budget_and_a_prompt_to_its_chunk(self) -> None:
        toy = ToyEngine(num_blocks=256, max_num_batched_tokens=40, prefill_chunk=16, max_num_seqs=8)
        peek = Peek(toy)
        toy.submit(*(ask(f"r{n}", [n, *LONG]) for n in range(4)))
        toy.step()
        assert peek.shape() == {"r0": 16, "r1": 16, "r2": 8}
        toy.finish()
        assert max(batch.num_tokens for batch in peek.batches) == 40
        assert max(len(row.token_ids) for batch in peek.batches for row in batch.rows) == 16

    def test_the_number_of_running_sequences_is_bounded(self) -> None:
        toy = ToyEngine(max_num_seqs=2)
        toy.submit(*(ask(f"r{n}", [n], max_tokens=3) for n in range(5)))
        assert told(toy.step()) == {"r0": 1, "r1": 1}
        toy.step(2)
        assert told(toy.step()) == {"r2": 1, "r3": 1}
        toy.finish()

    def test_a_decode_row_carries_one_token_however_long_its_past(self) -> None:
        toy = ToyEngine()
        peek = Peek(toy)
        toy.serve(ask("r", LONG, max_tokens=3))
        row = peek.batches[-1].rows[0]
        assert (row.start, row.token_ids) == (101, by_hand(LONG, 2)[1:])

    def test_nothing_to_do_is_no_batch(self) -> None:
        toy = ToyEngine()
        assert toy.scheduler.plan(0.0) is None

    def test_reservations_resume_when_starved_requests_have_left(self) -> None:
        toy = ToyEngine(num_blocks=8)  # of 4 tokens
        toy.submit(ask("r0", range(24)), ask("r1", range(30, 54)))
        toy.step()
        assert toy.scheduler.blocked, "r1 lacks blocks"
        toy.engine.abort(["r1", "r0"])
        assert not toy.scheduler.blocked
        toy.finish()


class TestOrder:
    def test_urgent_requests_come_first_then_earlier_ones(self) -> None:
        toy = ToyEngine(max_num_seqs=1)
        toy.submit(ask("a", [1], 1), ask("b", [2], 1), ask("urgent", [3], 1, priority=1))
        order = [update.request_id for _ in range(3) for update in toy.step()]
        assert order == ["urgent", "a", "b"]

    def test_the_urgent_cannot_starve_the_patient(self) -> None:
        toy = ToyEngine(max_num_seqs=1, priority_head_start_s=5.0)
        toy.submit(ask("patient", [1], 1))
        for number in range(20):
            toy.submit(ask(f"urgent{number}", [2, number], 1, priority=1))
            if "patient" in told(toy.step()):
                break
        assert number == 5  # it came as many seconds later as its priority is worth

    def test_the_large_are_not_overtaken_for_ever_by_the_small(self) -> None:
        toy = ToyEngine(num_blocks=16)
        toy.submit(ask("running", range(40), max_tokens=8))
        toy.step()
        toy.submit(ask("large", range(900, 950), 1), ask("small", [7], 1))
        assert "small" not in told(toy.step())
        answers = toy.finish()
        assert answers["large"].token_ids == by_hand(range(900, 950), 1)
        assert answers["small"].token_ids == by_hand([7], 1)


class TestPrefixCache:
    def test_a_prefix_is_computed_once(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("first", LONG, 1))
        toy.runner.num_computed = 0
        answer = toy.serve(ask("second", (*LONG, 7, 8), 4))["second"]
        assert toy.runner.num_computed == 2 + 3
        assert answer.cached == [100, 0, 0, 0]
        assert answer.token_ids == by_hand((*LONG, 7, 8), 4)

    def test_the_last_prompt_token_is_always_computed(self) -> None:
        toy = ToyEngine()
        for request_id in ("first", "again"):
            toy.serve(ask(request_id, range(16), 1))
        assert toy.answers["again"].cached == [12]
        assert toy.answers["again"].token_ids == by_hand(range(16), 1)

    def test_an_answer_serves_the_next_turn_of_the_conversation(self) -> None:
        toy = ToyEngine()
        turn = (*LONG, *toy.serve(ask("one", LONG, 13))["one"].token_ids)
        assert toy.serve(ask("two", (*turn, 5), 1))["two"].cached == [112]  # the last token was never computed

    def test_tenants_do_not_share(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("a", LONG, 1, cache_salt=b"a"))
        assert toy.serve(ask("b", LONG, 1, cache_salt=b"b"))["b"].cached == [0]
        assert toy.serve(ask("a2", LONG, 1, cache_salt=b"a"))["a2"].cached == [96]

    def test_the_cache_is_keyed_by_the_hashes_the_router_computes(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("r", LONG, 1, cache_salt=b"t"))
        assert len(toy.pool.match(chain_hashes(LONG, BLOCK, salt=b"t"))) == 25


class TestSiblings:
    def test_a_burst_of_siblings_computes_its_prefix_once(self) -> None:
        toy = ToyEngine(num_blocks=256, prefill_chunk=16)
        prompts = {f"r{n}": (*LONG, 500 + n) for n in range(6)}
        answers = toy.serve(*(ask(name, prompt, 5) for name, prompt in prompts.items()))
        assert toy.runner.num_computed == 100 + 6 + 6 * 4
        assert answers["r0"].cached[0] == 0
        assert all(answers[f"r{n}"].cached[0] == 100 for n in range(1, 6))
        assert all(answers[name].token_ids == by_hand(prompt, 5) for name, prompt in prompts.items())

    def test_only_shared_blocks_are_awaited(self) -> None:
        toy = ToyEngine(prefill_chunk=16)
        toy.submit(ask("first", LONG, 4), ask("branch", (*range(32), 900, 901, 902, 903), 4), ask("alone", [7], 4))
        assert told(toy.step()) == {"alone": 1}
        assert "branch" not in told(toy.step())
        assert told(toy.step())["branch"] == 1  # 32 tokens are there after two chunks; the first needs five more
        assert toy.finish()["branch"].cached[0] == 32

    def test_the_next_sibling_continues_for_an_aborted_one(self) -> None:
        toy = ToyEngine(prefill_chunk=16)
        toy.submit(*(ask(f"r{n}", LONG, 2) for n in range(3)))
        toy.step(2)
        toy.engine.abort(["r0"])
        answers = toy.finish()
        assert "r0" not in answers
        assert toy.runner.num_computed == 32 + 68 + 4 + 2  # two chunks, the rest, r2's last block, one decode each
        assert answers["r1"].token_ids == answers["r2"].token_ids == by_hand(LONG, 2)


class TestPreemption:
    def requests(self) -> list[Any]:
        return [ask(f"r{n}", range(100 * n, 100 * n + 14), 30) for n in range(4)]

    def test_the_latest_sequence_gives_way_without_changing_tokens(self) -> None:
        toy = ToyEngine(num_blocks=24)
        toy.submit(*self.requests())
        ended = [update.request_id for _ in range(400) for update in toy.step() if update.finish_reason]
        toy.engine.assert_idle()
        assert toy.scheduler.num_preemptions > 0
        assert ended == ["r0", "r1", "r2", "r3"]
        for n in range(4):
            assert toy.answers[f"r{n}"].token_ids == by_hand(range(100 * n, 100 * n + 14), 30)

    def test_the_least_urgent_gives_way_first(self) -> None:
        toy = ToyEngine(num_blocks=12)
        low, high = ask("low", range(20), 24), ask("high", range(50, 70), 24, priority=1)
        toy.submit(low)
        toy.step()
        toy.submit(high)
        ended = [update.request_id for _ in range(100) for update in toy.step() if update.finish_reason]
        assert toy.scheduler.num_preemptions > 0
        assert ended == ["high", "low"]
        assert toy.answers["low"].token_ids == by_hand(range(20), 24)

    def test_hits_of_a_recomputation_are_not_the_clients(self) -> None:
        toy = ToyEngine(num_blocks=30, prefill_chunk=8)
        toy.submit(ask("first", range(500, 518), 40))
        toy.step(3)
        answers = toy.serve(ask("r", LONG[:90], 3))
        assert toy.scheduler.num_preemptions == 1
        assert toy.runner.num_computed == 18 + 39 + 90 + 2 + 20  # 20 tokens were evicted, the others found again
        assert answers["r"].cached == [0, 0, 0]

    def test_a_newcomer_leaves_the_running_room_to_grow(self) -> None:
        toy = ToyEngine(num_blocks=8)
        toy.submit(ask("a", range(16), 12))
        toy.step()
        toy.submit(ask("b", range(500, 512), 2))
        assert told(toy.step()) == {"a": 1}  # b's three blocks would be the last but one
        toy.finish()
        assert toy.scheduler.num_preemptions == 0

    def test_a_sequence_that_fills_the_pool_ends_for_length(self) -> None:
        toy = ToyEngine(num_blocks=4)
        answer = toy.serve(ask("r", range(10), 100))["r"]
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == by_hand(range(10), 6)


class TestAdoption:
    """Blocks that were reserved and filled for a request before it ran, as a decode pool has it."""

    def adopt(self, toy: ToyEngine, role: Adopting, request_id: str, prompt_ids: range) -> None:
        """KV and first token come from elsewhere."""
        assert role.reserve(toy, request_id, prompt_ids)
        first = by_hand(prompt_ids, 1, weight=WEIGHT + 1)
        toy.submit(ask(request_id, prompt_ids, 10, output_ids=first))

    def expected(self, prompt_ids: range) -> tuple[int, ...]:
        return by_hand(prompt_ids, 10, first_weight=WEIGHT + 1)[1:]

    def test_a_request_with_a_ticket_computes_no_prompt(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role)
        self.adopt(toy, role, "r", range(20))
        assert toy.step(3) == []
        assert toy.pool.num_free == 64 - 5
        role.arrived.add("r")
        answer = toy.finish()["r"]
        assert answer.token_ids == self.expected(range(20))
        assert toy.runner.num_computed == 9

    def test_a_full_pool_admits_requests_that_need_no_blocks(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, num_blocks=10)
        toy.submit(ask("running", range(500, 514), 10))
        toy.step()
        self.adopt(toy, role, "r", range(21))
        role.arrived.add("r")
        assert toy.pool.num_free == 0
        assert told(toy.step()) == {"running": 1, "r": 1}
        toy.finish()

    def test_arrived_blocks_become_a_cached_prefix(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role)
        self.adopt(toy, role, "r", range(20))
        role.arrived.update({"r", "s"})
        toy.finish()
        assert len(toy.pool.match(chain_hashes(range(20), BLOCK))) == 5

    def test_a_preempted_request_recomputes_adopted_blocks(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, num_blocks=10)
        prompts = {"a": range(16), "b": range(50, 66)}
        for request_id, prompt_ids in prompts.items():
            self.adopt(toy, role, request_id, prompt_ids)
            role.arrived.add(request_id)
        answers = toy.finish()
        assert toy.scheduler.num_preemptions > 0
        assert all(answers[name].token_ids == self.expected(prompt) for name, prompt in prompts.items())

    def test_two_requests_lacking_a_block_do_not_deadlock(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, num_blocks=8)
        prompts = {"a": range(16), "b": range(50, 66)}
        for request_id, prompt_ids in prompts.items():
            self.adopt(toy, role, request_id, prompt_ids)
            role.arrived.add(request_id)
        assert toy.pool.num_free == 0
        answers = toy.finish()
        assert all(answers[name].token_ids == self.expected(prompt) for name, prompt in prompts.items())

    def test_a_request_with_blocks_passes_one_without(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, num_blocks=10)
        toy.submit(ask("large", range(500, 532), 2))
        self.adopt(toy, role, "adopted", range(18))
        role.arrived.add("adopted")
        assert told(toy.step()) == {"adopted": 1}
        assert toy.scheduler.blocked
        answers = toy.finish()
        assert not toy.scheduler.blocked
        assert answers["adopted"].token_ids == self.expected(range(18))
        assert answers["large"].token_ids == by_hand(range(500, 532), 2)

    def test_a_leaving_starved_request_unblocks_others(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, num_blocks=10)
        toy.submit(ask("large", range(500, 532), 2))
        assert role.reserve(toy, "promised", range(18))
        toy.step()
        assert toy.scheduler.blocked
        toy.engine.abort(["large"])
        assert not toy.scheduler.blocked

    def test_aborted_before_it_ran_it_gives_its_blocks_back(self) -> None:
        role = Adopting()
        toy = ToyEngine(role=role, max_num_seqs=1)
        self.adopt(toy, role, "a", range(20))
        self.adopt(toy, role, "b", range(20, 40))
        role.arrived.update({"a", "b"})
        toy.step()
        assert toy.engine.abort(["b"]) == 1
        assert set(toy.finish()) == {"a"}


class TestEndings:
    PROMPT = (1, 2, 3, 4, 5)
    TOKENS = by_hand(PROMPT, 12)

    def test_the_expected_tokens_differ(self) -> None:
        assert len(set(self.TOKENS)) == 12

    def serve(self, max_tokens: int = 12, eos_ids: tuple[int, ...] = (), **changes: Any) -> tuple[Any, ...]:
        answer = ToyEngine(eos_ids=eos_ids).serve(ask("r", self.PROMPT, max_tokens, **changes))["r"]
        return answer.token_ids, answer.finish_reason

    def test_max_tokens(self) -> None:
        assert self.serve(max_tokens=7) == (self.TOKENS[:7], FinishReason.LENGTH)
        assert self.serve(max_tokens=1) == (self.TOKENS[:1], FinishReason.LENGTH)

    def test_any_of_the_eos_ids_which_is_told_too(self) -> None:
        eos_ids = (self.TOKENS[9], self.TOKENS[3])
        assert self.serve(eos_ids=eos_ids) == (self.TOKENS[:4], FinishReason.STOP)

    def test_ignore_eos(self) -> None:
        assert self.serve(eos_ids=(self.TOKENS[3],), ignore_eos=True) == (self.TOKENS, FinishReason.LENGTH)

    def test_stop_token_ids_also_where_eos_is_ignored(self) -> None:
        stop: dict[str, Any] = {"stop_token_ids": (self.TOKENS[5],), "ignore_eos": True}
        assert self.serve(eos_ids=(self.TOKENS[3],), **stop) == (self.TOKENS[:6], FinishReason.STOP)

    def test_a_stop_on_the_last_token_is_a_stop(self) -> None:
        assert self.serve(max_tokens=4, eos_ids=(self.TOKENS[3],)) == (self.TOKENS[:4], FinishReason.STOP)

    @pytest.mark.parametrize("kind", ["eos", "stop"])
    def test_min_tokens_bans_ending_tokens(self, kind: str) -> None:
        eos_ids = (self.TOKENS[0],) if kind == "eos" else ()
        stop_ids = () if kind == "eos" else (self.TOKENS[0],)
        tokens, reason = self.serve(eos_ids=eos_ids, stop_token_ids=stop_ids, min_tokens=3, max_tokens=8)
        assert self.TOKENS[0] not in tokens[:3]
        assert len(tokens) >= 3
        assert reason in (FinishReason.LENGTH, FinishReason.STOP)

    def test_min_tokens_counts_from_the_start_of_the_answer(self) -> None:
        """The token at index min_tokens may be the last; one before it may not."""
        last: dict[str, Any] = {"eos_ids": (self.TOKENS[3],)}
        assert self.serve(min_tokens=3, **last)[0] == self.TOKENS[:4]
        assert len(self.serve(min_tokens=4, **last)[0]) > 4

    def test_max_model_len_counts_prompt_and_answer(self) -> None:
        answer = ToyEngine(max_model_len=9).serve(ask("r", self.PROMPT, 100))["r"]
        assert (answer.token_ids, answer.finish_reason) == (self.TOKENS[:4], FinishReason.LENGTH)

    def test_no_answer_at_all_may_be_asked_for(self) -> None:
        answer = ToyEngine(prefill_chunk=3).serve(ask("r", self.PROMPT, 0, prompt_logprobs=0))["r"]
        assert (answer.token_ids, answer.finish_reason) == ((), FinishReason.LENGTH)
        assert len(answer.prompt_logprobs) == 4


class TestLogprobs:
    def chosen(self, toy: ToyEngine, name: str) -> list[int]:
        return [entry.chosen.token_id for entry in toy.answers[name].prompt_logprobs]

    def test_every_token_has_its_own(self) -> None:
        answer = ToyEngine().serve(ask("r", LONG, 5, logprobs=2))["r"]
        assert tuple(entry.chosen.token_id for entry in answer.logprobs) == answer.token_ids
        assert all(len(entry.top) == 2 for entry in answer.logprobs)

    def test_prompt_logprobs_cover_all_tokens_but_the_first(self) -> None:
        toy = ToyEngine(prefill_chunk=7)
        for request_id in ("cold", "warm"):
            toy.serve(ask(request_id, LONG, 2, prompt_logprobs=1))
            assert self.chosen(toy, request_id) == list(LONG[1:])
            assert toy.answers[request_id].cached[-2:] == [0, 0]
        assert all(len(entry.top) == 1 for entry in toy.answers["warm"].prompt_logprobs)
        assert toy.serve(ask("plain", LONG, 1))["plain"].cached == [96]

    def test_prompt_logprobs_are_reported_once_after_preemption(self) -> None:
        toy = ToyEngine(num_blocks=30, prefill_chunk=8)
        toy.submit(ask("first", range(500, 518), 40))
        toy.step(3)
        toy.submit(ask("r", LONG[:90], 3, prompt_logprobs=0))
        toy.finish()
        assert toy.scheduler.num_preemptions > 0
        assert self.chosen(toy, "r") == list(LONG[1:90])
        assert toy.answers["r"].token_ids == by_hand(LONG[:90], 3)

    def test_of_the_prompt_they_are_not_given_again_after_a_failover(self) -> None:
        toy = ToyEngine()
        toy.serve(ask("r", LONG, 5, prompt_logprobs=0, output_ids=by_hand(LONG, 2)))
        assert toy.answers["r"].prompt_logprobs == ()


class TestSampling:
    def test_penalties_get_their_counts_only(self) -> None:
        toy = ToyEngine()
        peek = Peek(toy)
        toy.submit(ask("plain", [1, 2], 3), ask("penal", [3, 4], 3, presence_penalty=0.5))
        toy.step(3)
        plain, penal = (row.sample for row in peek.batches[-1].rows)
        assert plain is not None
        assert penal is not None
        assert (plain.prompt_ids, plain.output_ids) == ((), ())
        assert (penal.prompt_ids, penal.output_ids) == ((3, 4), by_hand([3, 4], 2))

    @pytest.mark.parametrize("num_given", [1, 5, 11])
    def test_an_answer_goes_on_elsewhere_as_it_would_have_here(self, num_given: int) -> None:
        params = SamplingParams(seed=42, temperature=0.8)
        whole = by_hand(LONG, 12, params=params)
        request = ask("r", LONG, 12, output_ids=whole[:num_given], seed=42, temperature=0.8)
        assert ToyEngine(prefill_chunk=16).serve(request)["r"].token_ids == whole[num_given:]


class TestAbort:
    def test_waiting_and_running_requests_go_at_once(self) -> None:
        toy = ToyEngine(max_num_seqs=1)
        toy.submit(ask("running", LONG), ask("waiting", LONG))
        toy.step()
        assert toy.engine.abort(["running", "waiting", "unknown", "running"]) == 2
        toy.engine.assert_idle()
        assert toy.step() == []

    @pytest.mark.parametrize("resubmitted", [False, True])
    def test_between_plan_and_apply_the_output_is_dropped(self, resubmitted: bool) -> None:
        toy = ToyEngine()
        toy.submit(ask("gone", [1, 2]), ask("stays", [3, 4]))
        batch = toy.scheduler.plan(1.0)
        assert batch is not None
        toy.scheduler.abort(["gone"])
        if resubmitted:
            toy.submit(ask("gone", [5, 6], 2))
        updates = toy.scheduler.apply(batch, StepOutput(rows=(RowOutput(token_ids=(9,)), RowOutput(token_ids=(9,)))))
        toy.engine.check_integrity()
        assert told(updates) == {"stays": 1}
        toy.engine.abort(["stays"])
        answers = toy.finish()
        assert set(answers) == ({"gone"} if resubmitted else set())
        assert not resubmitted or answers["gone"].token_ids == by_hand([5, 6], 2)

    def test_an_aborted_requests_blocks_stay_cached(self) -> None:
        toy = ToyEngine(prefill_chunk=16)
        toy.submit(ask("r", LONG))
        toy.step(2)
        toy.engine.abort(["r"])
        assert toy.serve(ask("s", LONG, 1))["s"].cached == [32]
