"""The host tier, driven through the engine with the toy model: what was evicted comes back, right, in time, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.hashing import chain_hashes
from protos.values import BlockRemoved, BlockStored, Cleared, KVEvent, Tier
from tests.unit.workers.harness import BLOCK, ToyEngine, ask, by_hand

LONG = tuple(range(100))
OTHER = tuple(range(500, 600))


def tiers(events: Sequence[KVEvent], *, all_told: bool = True) -> dict[Tier, dict[bytes, bytes]]:
    """The blocks of each tier with their parents, by these events. Asserts that a worker that has a block has its
    parent, or has reported its loss, if all of its events are here."""
    held: dict[Tier, dict[bytes, bytes]] = {Tier.DEVICE: {}, Tier.HOST: {}}
    lost: set[bytes] = set()
    for event in events:
        match event:
            case BlockStored():
                for block, parent in zip(event.hashes, (event.parent, *event.hashes[:-1]), strict=True):
                    held[event.tier][block] = parent
                    lost.discard(block)
                    reachable = not parent or parent in lost or any(parent in tier for tier in held.values())
                    assert reachable or not all_told
            case BlockRemoved():
                for block in event.hashes:
                    del held[event.tier][block]
                    lost.add(block)
            case Cleared():
                lost |= held[Tier.DEVICE].keys() | held[Tier.HOST].keys()
                held = {Tier.DEVICE: {}, Tier.HOST: {}}
    return held


def told(toy: ToyEngine) -> dict[Tier, dict[bytes, bytes]]:
    events = toy.log.since(1, 0)
    assert events is not None
    return tiers(events.events)


def evict(toy: ToyEngine) -> None:
    """Fills the device with something else."""
    toy.serve(ask(f"filler {toy.now}", range(700, 699 + toy.pool.num_blocks * BLOCK), 1))


class TestHits:
    @pytest.mark.parametrize("head_stays", [True, False])
    def test_pages_without_a_heads_kv_return_without_it(self, *, head_stays: bool) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        cached = toy.pool.match(chain_hashes(LONG, BLOCK))
        toy.pool.head_stays = head_stays
        if not head_stays:
            toy.pool.headless.update(cached[:3])
        evict(toy)
        assert not toy.pool.headless
        toy.serve(ask("again", LONG, 1))
        cached = toy.pool.match(chain_hashes(LONG, BLOCK))
        assert len(cached) == 100 // BLOCK
        num_headless = (100 - 1) // BLOCK if head_stays else 3
        assert toy.pool.headless == set(cached[:num_headless])
        evict(toy)
        toy.pool.head_stays = False
        toy.pool.headless.clear()
        toy.pool.clear()
        toy.serve(ask("anew", LONG, 1))
        evict(toy)
        toy.serve(ask("back", LONG, 1))
        assert not toy.pool.headless, "slots are used again"

    def test_an_evicted_prefix_is_loaded_and_not_computed(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        assert toy.pool.match(chain_hashes(LONG, BLOCK)) == []
        toy.runner.num_computed = 0
        answer = toy.serve(ask("again", (*LONG, 7, 8), 4))["again"]
        assert answer.token_ids == by_hand((*LONG, 7, 8), 4)
        assert answer.cached[0] == 100
        assert toy.runner.num_computed == 2 + 3
        assert toy.host is not None
        load = toy.host.load()
        assert (load.num_loaded, load.num_hit_tokens, load.load_s) == (25, 100, 0.125)

    def test_blocks_on_the_device_are_not_loaded(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        toy.serve(ask("other", OTHER[:40], 1))  # evicts a few blocks of the tail
        assert 0 < len(toy.pool.match(chain_hashes(LONG, BLOCK))) < 25
        toy.serve(ask("again", (*LONG, 7), 1))
        assert toy.answers["again"].cached == [100]
        assert toy.host is not None
        assert 0 < toy.host.load().num_loaded < 25

    def test_tiers_report_their_use(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        toy.serve(ask("again", LONG, 1))
        evict(toy)
        toy.serve(ask("late", LONG, 1))
        device, host = toy.pool.tiers()
        assert (device.tier, device.num_used, device.num_hit_tokens) == ("device", 0, 96), (
            "the second's, not the third's"
        )
        assert device.num_evicted > 0
        assert (host.tier, host.num_used, host.num_hit_tokens, host.num_loaded) == ("host", 0, 96, 24)
        assert toy.pool.host is not None
        assert (host.num_blocks, host.num_cached) == (100, len(toy.pool.host.entries()))

    def test_tenants_do_not_share(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=200)
        toy.serve(ask("a", LONG, 1, cache_salt=b"a"))
        evict(toy)
        assert toy.serve(ask("b", LONG, 1, cache_salt=b"b"))["b"].cached == [0]
        evict(toy)
        assert toy.serve(ask("a2", LONG, 1, cache_salt=b"a"))["a2"].cached == [96]

    def test_a_loaded_block_is_not_copied_again(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        toy.serve(ask("again", LONG, 1))
        stowed = toy.copies.num_stowed
        evict(toy)
        assert toy.copies.num_stowed == stowed

    def test_a_preempted_request_finds_its_blocks_on_the_host(self) -> None:
        toy = ToyEngine(num_blocks=16, host_slots=100)
        prompts = {"a": tuple(range(24)), "b": tuple(range(40, 64))}
        toy.serve(*(ask(name, prompt, 30) for name, prompt in prompts.items()))
        assert toy.scheduler.num_preemptions > 0
        assert {name: toy.answers[name].token_ids for name in prompts} == {
            name: by_hand(prompt, 30) for name, prompt in prompts.items()
        }
        assert toy.host is not None
        assert toy.host.load().num_hit_tokens > 0

    def test_positions_with_prompt_logprobs_are_computed(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        answer = toy.serve(ask("again", LONG, 1, prompt_logprobs=0))["again"]
        assert (len(answer.prompt_logprobs), answer.cached[-1]) == (99, 0)

    def test_a_prompt_computed_faster_than_loaded_is_computed(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=100)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        toy.copies.blocks_per_s = 1e-9
        assert toy.serve(ask("again", LONG, 1))["again"].cached == [0]
        assert toy.host is not None
        assert (toy.host.load().num_hit_tokens, toy.host.load().num_passed_tokens) == (0, 96)


class TestWaiting:
    """A load that takes some steps."""

    def host(self, **config: Any) -> ToyEngine:
        toy = ToyEngine(num_blocks=40, host_slots=100, **config)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        toy.copies.patience = 4
        return toy

    def test_others_go_on_while_blocks_are_loaded(self) -> None:
        toy = self.host()
        toy.submit(ask("busy", [1, 2, 3], 20))
        toy.step()
        toy.submit(ask("again", (*LONG, *range(30)), 2))
        backlog = toy.engine.load().queued_prefill_tokens
        seen = [[update.request_id for update in toy.step()]]
        assert toy.engine.load().queued_prefill_tokens == backlog == 30, "what is not loaded is still to be computed"
        seen += [[update.request_id for update in toy.step()] for _ in range(4)]
        assert seen[:3] == [["busy"]] * 3
        assert sorted(seen[-1]) == ["again", "busy"]
        toy.finish()
        assert toy.answers["again"].token_ids == by_hand((*LONG, *range(30)), 2)
        assert toy.answers["again"].cached[0] == 100

    def test_nobody_waits_for_a_look_when_nobody_else_computes(self) -> None:
        toy = self.host()
        toy.submit(ask("again", LONG, 2))
        assert [update.request_id for update in toy.step()] == ["again"]
        assert toy.finish()["again"].token_ids == by_hand(LONG, 2)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_an_abort_frees_everything_once_the_load_is_over(self, depth: int) -> None:
        toy = self.host(depth=depth)
        toy.submit(ask("busy", [1, 2, 3], 12))
        toy.step(2)
        toy.submit(ask("again", LONG, 2))
        toy.step()
        free = toy.pool.num_free
        assert toy.engine.abort(["again"]) == 1
        assert toy.pool.num_free == free, "blocks that are being written are nobody else's"
        toy.step(6)
        assert toy.pool.num_free >= free + 24
        assert len(toy.pool.match(chain_hashes(LONG, BLOCK))) == 24, "what has been loaded is cached"
        toy.finish()

    def test_an_engine_with_only_an_aborted_request_ends(self) -> None:
        toy = self.host(depth=1)
        toy.submit(ask("busy", [1, 2, 3], 2))
        toy.step()
        toy.submit(ask("again", LONG, 2))
        toy.step()
        toy.engine.abort(["again", "busy"])
        assert toy.engine.has_work()
        toy.finish()

    def test_siblings_wait_for_one_load(self) -> None:
        toy = self.host()
        toy.submit(ask("busy", [1, 2, 3], 20))
        toy.step()
        toy.submit(*(ask(f"again{n}", (*LONG, n), 1) for n in range(3)))
        toy.finish()
        assert toy.host is not None
        assert toy.host.load().num_loaded == 25
        assert [toy.answers[f"again{n}"].cached for n in range(3)] == [[100]] * 3

    def test_the_number_of_running_sequences_is_bounded(self) -> None:
        toy = self.host(max_num_seqs=2)
        toy.submit(ask("busy", [1, 2, 3], 20))
        toy.step()
        toy.submit(ask("again", LONG, 9), ask("late", [5], 9))
        for _ in range(12):
            toy.step()
            assert toy.scheduler.num_running <= 2
        toy.finish()

    def test_blocks_loaded_for_a_silent_client_go_to_others(self) -> None:
        toy = self.host()
        toy.submit(ask("busy", [1, 2, 3], 4))
        toy.step()
        toy.submit(ask("again", LONG, 9))
        toy.step()
        toy.scheduler.set_unread("again", is_unread=True, now=toy.now)
        toy.submit(ask("large", OTHER, 2))
        toy.step(20)
        assert toy.answers["large"].token_ids == by_hand(OTHER, 2)
        toy.scheduler.set_unread("again", is_unread=False, now=toy.now)
        assert toy.finish()["again"].token_ids == by_hand(LONG, 9)

    def test_a_load_during_a_reset_is_not_cached(self) -> None:
        toy = self.host()
        toy.submit(ask("busy", [1, 2, 3], 20))
        toy.step()
        toy.submit(ask("again", LONG, 1))
        toy.step()
        toy.pool.clear()
        toy.finish()
        assert toy.answers["again"].token_ids == by_hand(LONG, 1)
        hashes = chain_hashes(LONG, BLOCK)
        assert toy.host is not None
        assert toy.pool.match(hashes) == toy.host.match(hashes) == []


class TestRoom:
    def test_the_host_is_bounded_and_forgets_tails_before_heads(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=10)
        toy.serve(ask("first", LONG, 1))
        evict(toy)
        hashes = chain_hashes(LONG, BLOCK)
        assert toy.host is not None
        assert len(toy.host.match(hashes)) == 10
        assert toy.serve(ask("again", LONG, 1))["again"].cached == [40]

    def test_copies_are_made_in_batches_ahead_of_need(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=400)
        toy.serve(ask("first", range(31 * BLOCK), 1))
        block_ids = toy.pool.allocate(2)
        assert block_ids is not None
        assert toy.copies.num_stowed == 1 + 16, "one was empty, one is evicted"
        toy.pool.release(block_ids)

    def test_an_index_gets_each_blocks_tier(self) -> None:
        toy = ToyEngine(num_blocks=32, host_slots=60)
        for number in range(6):
            toy.serve(ask(f"r{number}", range(number % 4 * 100, number % 4 * 100 + 60), 5))
        held = told(toy)
        snapshot = tiers(toy.pool.snapshot(), all_told=False)
        assert held == snapshot
        assert held[Tier.HOST]
        assert held[Tier.DEVICE]
        toy.pool.clear()
        assert told(toy) == {Tier.DEVICE: {}, Tier.HOST: {}}
        assert toy.pool.snapshot() == ()


PROMPTS = [tuple(range(n, n + length)) for n, length in ((0, 60), (0, 61), (300, 48), (300, 80), (600, 70), (900, 5))]
EVENT = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(PROMPTS), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("abort"), st.integers(1, 3), st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
    st.tuples(st.just("unread"), st.integers(1, 4), st.booleans()),
)


@settings(max_examples=100)
@given(
    happens=st.lists(EVENT, min_size=5, max_size=40),
    num_blocks=st.sampled_from([24, 40]),
    host_slots=st.sampled_from([3, 20, 90]),
    patience=st.integers(0, 5),
    depth=st.sampled_from([0, 1, 2]),
)
def test_whatever_happens_answers_are_right_and_nothing_leaks(
    happens: list[Any], num_blocks: int, host_slots: int, patience: int, depth: int
) -> None:
    """Counts are checked after every step, and an index with all events agrees."""
    toy = ToyEngine(
        num_blocks=num_blocks, host_slots=host_slots, depth=depth, prefill_chunk=16, max_num_batched_tokens=32,
        max_num_seqs=4, log_capacity=100_000,
    )  # fmt: skip
    toy.copies.patience = patience
    asked: dict[str, tuple[tuple[int, ...], int]] = {}
    gone: set[str] = set()
    for what, first, second in happens:
        if what == "ask":
            name = f"r{len(asked)}"
            asked[name] = (first, second)
            toy.submit(ask(name, first, second))
        elif what == "step":
            toy.step(first)
        elif what == "clear":
            toy.pool.clear()
        elif what == "unread":
            toy.scheduler.set_unread(f"r{len(asked) - first}", second, toy.now)
        elif (name := f"r{len(asked) - first}") in toy.scheduler:
            toy.engine.abort([name])
            gone.add(name)
    answers = toy.finish()
    for name, (prompt, num_tokens) in asked.items():
        if name not in gone:
            assert answers[name].token_ids == by_hand(prompt, num_tokens)
    assert told(toy) == tiers(toy.pool.snapshot(), all_told=False)
