"""Windows that free: every page that attention reads is the sequence's own and computed, and no other page is held."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.events import EventLog
from kvtransfer.hashing import chain_hashes
from kvtransfer.windows import PageWindows
from protos.errors import ContextLengthExceeded
from protos.values import BlockRemoved, BlockStored, GenerateRequest, KVEvent, Tier
from tests.unit.workers.harness import VOCAB, Answer, AtLast, ask
from tests.unit.workers.pages import PageCopies, PageRunner, answer
from tests.unit.workers.sync_pipeline import SyncPipeline
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool, page_hash
from workers.kv.host import HostPool
from workers.scheduling.role import Role
from workers.scheduling.scheduler import Scheduler
from workers.worker_config import SchedulerConfig

LONG = tuple(range(100))


class WindowEngine:
    def __init__(
        self,
        windows: tuple[int | None, ...],
        *,
        num_pages: int,
        block_size: int = 4,
        depth: int = 0,
        host_slots: int = 0,
        **config: Any,
    ) -> None:
        self.events: list[KVEvent] = []
        self.runner = PageRunner(windows, block_size)
        self.copies = PageCopies(self.runner)
        host = None
        if host_slots:
            host = HostPool(host_slots, self.copies, self.events.append, block_bytes=1, num_groups=len(windows))
        self.pool = BlockPool(num_pages, block_size, self.events.append, host=host, windows=windows)
        limits: dict[str, Any] = {"max_model_len": 400, "vocab_size": VOCAB, "prefill_chunk": 8} | config
        scheduler = SchedulerConfig(time_slice_s=math.inf, **limits)
        self.scheduler = Scheduler(scheduler, self.pool, Role())
        pipeline = AtLast(self.runner) if depth else SyncPipeline(self.runner)
        self.engine = Engine(self.scheduler, pipeline, events=EventLog(incarnation=1), clock=lambda: 0.0, depth=depth)
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.now = 0.0

    def submit(self, request: GenerateRequest) -> None:
        self.engine.submit(request, self.now)
        text = request.prompt_ids + answer(request.prompt_ids, request.sampling.max_tokens)
        self.runner.expect(request.request_id, text)

    def step(self) -> None:
        self.now += 1.0
        for update in self.engine.step(self.now):
            self.answers[update.request_id].add(update)
        self.engine.check_integrity()

    def finish(self) -> None:
        for _ in range(5_000):
            if not self.engine.has_work():
                break
            self.step()
        self.engine.assert_idle()

    def serve(self, request_id: str, prompt_ids: tuple[int, ...], num_tokens: int = 2) -> int:
        """Serves one request alone; returns how many tokens of its prompt were cached."""
        self.submit(ask(request_id, prompt_ids, num_tokens))
        self.finish()
        assert self.answers[request_id].token_ids == answer(prompt_ids, num_tokens)
        return max(self.answers[request_id].cached)


WINDOWS = st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 9, 30]), min_size=1, max_size=3).map(tuple)


@settings(max_examples=50)
@given(
    windows=WINDOWS,
    block_size=st.sampled_from([1, 2, 4, 8]),
    depth=st.sampled_from([0, 1, 2]),
    chunk=st.sampled_from([1, 3, 8, 64]),
    seed=st.integers(0, 2**32),
)
def test_attention_reads_own_and_computed_pages_only(
    windows: tuple[int | None, ...], block_size: int, depth: int, chunk: int, seed: int
) -> None:
    """Random requests with shared beginnings, in pools so small that they preempt each other, with and without a host
    tier."""
    rng = random.Random(seed)
    least = PageWindows(block_size=block_size, windows=windows).num_held(60, chunk)
    toy = WindowEngine(
        windows,
        num_pages=least + rng.choice((0, 3, 20, 100)),
        block_size=block_size,
        depth=depth,
        prefill_chunk=chunk,
        max_num_seqs=rng.choice((1, 3, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 100)),
        host_slots=rng.choice((0, 4, 300)),
    )
    toy.copies.patience = rng.choice((0, 1, 5))
    prefixes = [tuple(rng.randrange(VOCAB) for _ in range(40)) for _ in range(2)]
    asked = {}
    for number in range(7):
        prompt_ids = (*rng.choice(prefixes)[: rng.randrange(1, 41)], *(number,) * rng.randrange(3))
        asked[f"r{number}"] = prompt_ids, rng.randrange(1, 17)
        toy.submit(ask(f"r{number}", *asked[f"r{number}"]))
        if rng.random() < 0.1:
            toy.engine.abort([f"r{rng.randrange(number + 1)}"])
        for _ in range(rng.randrange(6)):
            toy.step()
    toy.finish()
    for request_id, (prompt_ids, num_tokens) in asked.items():
        found = toy.answers[request_id]
        assert found.token_ids == answer(prompt_ids, num_tokens)[: len(found.token_ids)]
        assert found.finish_reason is not None or request_id not in toy.scheduler


def test_a_long_answer_holds_no_page_behind_its_window() -> None:
    toy = WindowEngine((None, 8), num_pages=110)
    toy.submit(ask("r", LONG, 250))
    held = []
    while toy.engine.has_work():
        toy.step()
        request = toy.scheduler.find("r")
        held.append([len(table) for table in request.held()] if request is not None else [0, 0])
    assert max(full for full, _ in held) == 87  # of 348 tokens before the last that is computed
    assert max(windowed for _, windowed in held[12:]) == 3  # of 8 positions
    assert toy.answers["r"].token_ids == answer(LONG, 250)


def test_a_context_is_served_that_would_not_fit_without_freeing() -> None:
    assert WindowEngine((8,), num_pages=8).scheduler.max_len == 400
    assert WindowEngine((None, 8), num_pages=50).scheduler.max_len == (50 - 5) * 4
    assert WindowEngine((None, None), num_pages=50).scheduler.max_len == 25 * 4
    toy = WindowEngine((8,), num_pages=8)  # of 32 tokens
    toy.serve("r", LONG, 200)
    small = WindowEngine((None, 8), num_pages=20)
    with pytest.raises(ContextLengthExceeded):
        small.submit(ask("r", LONG))


def test_the_load_counts_blocks_of_all_layers() -> None:
    toy = WindowEngine((None, 8, 8), num_pages=90)
    load = toy.engine.load()
    assert (load.num_blocks, load.num_free_blocks) == (30, 30)
    toy.submit(ask("r", LONG, 8))
    toy.step()
    load = toy.engine.load()
    assert load.num_free_blocks == (90 - 25 - 2 * 5) // 3
    toy.finish()


class TestPrefixHits:
    def test_a_hit_needs_the_windows_pages_only(self) -> None:
        toy = WindowEngine((None, 8), num_pages=200)
        assert toy.serve("cold", LONG) == 0
        forget(toy.pool, LONG, group=1, blocks=range(22))
        assert toy.serve("warm", LONG) == 96

    def test_a_missing_window_page_shortens_the_hit(self) -> None:
        toy = WindowEngine((None, 8), num_pages=200)
        toy.serve("cold", LONG)
        forget(toy.pool, LONG, group=1, blocks=(20,))
        assert toy.serve("at 96", LONG) == 96
        forget(toy.pool, LONG, group=1, blocks=(23,))
        assert toy.serve("before it", LONG) == 23 * 4
        forget(toy.pool, LONG, group=1, blocks=(22, 23))
        assert toy.serve("before both", LONG) == 20 * 4  # block 20, that the window of 22 blocks reaches, is gone too

    def test_a_layer_that_reads_all_needs_all(self) -> None:
        toy = WindowEngine((None, 8), num_pages=200)
        toy.serve("cold", LONG)
        forget(toy.pool, LONG, group=0, blocks=(5,))
        assert toy.serve("warm", LONG) == 20

    def test_if_all_layers_have_a_window_a_hit_needs_no_first_block(self) -> None:
        toy = WindowEngine((8,), num_pages=200)
        toy.serve("cold", LONG)
        forget(toy.pool, LONG, group=0, blocks=range(20))
        assert toy.serve("warm", LONG) == 96

    @pytest.mark.parametrize("windows", [(8,), (None, 8)])
    def test_a_prompt_that_another_computes_is_waited_for(self, windows: tuple[int | None, ...]) -> None:
        toy = WindowEngine(windows, num_pages=200)
        for name in ("first", "second"):
            toy.submit(ask(name, LONG, 2))
        toy.finish()
        assert [max(toy.answers[name].cached) for name in ("first", "second")] == [0, 96]

    def test_events_name_the_blocks_of_the_first_group(self) -> None:
        toy = WindowEngine((None, 8), num_pages=40)
        for number in range(6):
            toy.serve(f"r{number}", tuple(range(number * 100, number * 100 + 60)), 1)
        stored = [digest for event in toy.events if isinstance(event, BlockStored) for digest in event.hashes]
        removed = [digest for event in toy.events if isinstance(event, BlockRemoved) for digest in event.hashes]
        assert len(stored) == 6 * 15
        assert len(removed) > 30
        assert {len(hashes) for hashes in stored + removed} == {16}
        told = set(stored) - set(removed)
        assert {digest for chain in toy.pool.snapshot() for digest in chain.hashes} == told


class TestHostTier:
    @pytest.mark.parametrize(("windows", "num_loaded"), [((None, 8), 24 + 2), ((8,), 2), ((None, 8, 30), 24 + 2 + 8)])
    @pytest.mark.parametrize("patience", [0, 3])
    def test_of_a_window_the_tail_is_loaded(
        self, windows: tuple[int | None, ...], num_loaded: int, patience: int
    ) -> None:
        toy = WindowEngine(windows, num_pages=120, host_slots=200)
        toy.copies.patience = patience
        toy.serve("cold", LONG)
        evict(toy)
        assert toy.serve("warm", LONG) == 96
        host = toy.pool.host
        assert host is not None
        assert host.load().num_hit_tokens == 96
        assert toy.copies.num_onloaded == num_loaded
        assert toy.pool.match_prefix(chain_hashes(LONG, 4)).num_blocks == 25, "it is cached there again"

    def test_pages_that_slid_behind_a_window_are_not_copied(self) -> None:
        for num_tokens in range(1, 9):
            toy = WindowEngine((None, 8), num_pages=60, host_slots=200, prefill_chunk=8)
            toy.serve("cold", LONG, num_tokens)
            toy.serve("filler", tuple(range(500, 600)), 1)
            assert toy.copies.num_offloaded <= 27 + 4
            evict(toy)
            text = LONG + answer(LONG, num_tokens)
            assert toy.serve("warm", (*text, 1, 2, 3)) == (len(text) - 1) // 4 * 4

    def test_a_beginning_that_several_prompts_share_is_kept(self) -> None:
        toy = WindowEngine((None, 8), num_pages=120, host_slots=400)
        for name in range(2):
            toy.serve(str(name), (*LONG[:60], *[name + 500] * 40))
        evict(toy)
        assert toy.serve("third", (*LONG[:60], 7, 8)) == 60

    def test_pages_of_both_tiers_make_one_prefix(self) -> None:
        toy = WindowEngine((None, 8), num_pages=120, host_slots=400)
        toy.serve("cold", LONG)
        forget(toy.pool, LONG, group=1, blocks=range(25))
        assert toy.pool.match_prefix(chain_hashes(LONG, 4)).num_blocks == 0
        assert toy.serve("warm", LONG) == 96
        assert toy.copies.num_onloaded == 2

    def test_an_aborted_load_gives_back_the_pages_of_each_group(self) -> None:
        toy = WindowEngine((None, 8), num_pages=120, host_slots=400)
        toy.serve("cold", LONG)
        evict(toy)
        toy.copies.patience = 3
        toy.submit(ask("busy", (1, 2, 3), 20))
        toy.step()
        toy.submit(ask("gone", LONG, 2))
        toy.step()
        toy.engine.abort(["gone"])
        toy.finish()
        assert toy.serve("warm", LONG) == 96

    def test_events_name_the_blocks_of_the_first_group(self) -> None:
        toy = WindowEngine((None, 8), num_pages=40, host_slots=30)
        for number in range(6):
            toy.serve(f"r{number}", tuple(range(number * 100, number * 100 + 60)), 1)
        on_host: set[bytes] = set()
        for event in toy.events:
            if isinstance(event, BlockStored) and event.tier is Tier.HOST:
                on_host.update(event.hashes)
            elif isinstance(event, BlockRemoved) and event.tier is Tier.HOST:
                on_host.difference_update(event.hashes)
        assert {len(hashes) for hashes in on_host} == {16}
        assert {
            digest for chain in toy.pool.snapshot() if chain.tier is Tier.HOST for digest in chain.hashes
        } == on_host


def evict(toy: WindowEngine) -> None:
    """Fills the device with nothing."""
    pages = toy.pool.allocate(toy.pool.num_free)
    assert pages is not None
    toy.pool.release(pages)


def forget(pool: BlockPool, prompt_ids: tuple[int, ...], *, group: int, blocks: range | tuple[int, ...]) -> None:
    """Evicts a group's pages of a prompt, by using all others before the pool is filled."""
    hashes = chain_hashes(prompt_ids, pool.block_size)
    gone = {page_hash(hashes[block], group) for block in blocks}
    others = [page for page in range(pool.num_blocks) if pool.hash_of(page) not in (None, *gone)]
    pool.acquire(others)
    taken = pool.allocate(pool.num_free)
    assert taken is not None
    pool.release(taken)
    pool.release(others)
