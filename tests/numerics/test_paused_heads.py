"""A head that is paused computes nothing: no token changes, and it begins behind what was computed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.values import GenerateRequest, SamplingParams
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import disaggregated, handed_over, moved, pulled, two
from tests.numerics.test_moved_heads import PARAMS, PROMPT, Drafts, config, head
from workers.engine.engine import Engine
from workers.kernels.cpu.native_build import native

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
__all__ = ["head"]


@pytest.fixture(scope="module")
def tokens(target: Path) -> list[int]:
    """Without a head."""
    with colocated(config(target)) as engine:
        return answer(engine, [PROMPT], PARAMS)[0].token_ids


def pause(engine: Engine, num_steps: int = 10**6) -> None:
    """From now on, for so many steps. These engines measure no time, so that nothing else pauses the head."""
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation._payoffs["eagle"].num_paused = num_steps


def lengths(drafts: Drafts) -> list[int]:
    """The lengths of the sequence at which something was drafted."""
    return [length for length, ids in drafts.after.items() if ids]


def test_a_pause_in_mid_answer(target: Path, head: str, tokens: list[int]) -> None:
    with colocated(config(target, head)) as engine:
        drafts = Drafts(engine)
        engine.submit(GenerateRequest(request_id="r", prompt_ids=tuple(PROMPT), sampling=PARAMS), 0.0)
        seen: list[int] = []
        while engine.has_work():
            if 8 <= len(seen) < 12:
                pause(engine, 2)
            seen += [token for update in engine.step(0.0) for token in update.token_ids]
        assert seen == tokens
        drafted = lengths(drafts)
        assert min(drafted) < len(PROMPT) + 8
        assert max(drafted) > len(PROMPT) + 20
        assert not any(len(PROMPT) + 12 <= length < len(PROMPT) + 15 for length in drafted)
        assert engine.pool.headless


def test_a_prompt_that_was_computed_in_a_pause_serves_later_ones(target: Path, head: str, tokens: list[int]) -> None:
    with colocated(config(target, head)) as engine:
        pause(engine)
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
        pause(engine, 0)
        drafts = Drafts(engine)
        (output,) = answer(engine, [PROMPT], PARAMS)
    assert output.token_ids == tokens
    assert output.num_cached_tokens == 36
    assert lengths(drafts), "the head sees what follows"


@pytest.mark.parametrize("paused", ["old", "new", "both"])
def test_a_sequence_that_moves(target: Path, head: str, tokens: list[int], paused: str) -> None:
    with two(config(target, head)) as (old, new):
        for worker, name in ((old, "old"), (new, "new")):
            if paused in (name, "both"):
                pause(worker.engine, 15)
        drafts = Drafts(new.engine)
        assert moved(old, new, PROMPT, PARAMS, num_before=9) == tokens
    assert lengths(drafts)


def test_a_pulled_prefix_and_a_prefill_worker(target: Path, head: str, tokens: list[int]) -> None:
    with two(config(target, head)) as (old, new):
        pause(old.engine)
        assert pulled(old, new, PROMPT, PARAMS) == (tokens, 36)
    with disaggregated(config(target, head), config(target, head)) as (first, then):
        pause(then.engine, 12)
        drafts = Drafts(then.engine)
        assert handed_over(first, then, PROMPT, PARAMS) == tokens
    assert lengths(drafts)


def test_the_host_tier_records_missing_head_kv(target: Path, head: str, tokens: list[int]) -> None:
    with colocated(config(target, head, num_blocks=20, host_kv_gib=0.001)) as engine:
        pause(engine)
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
        pause(engine, 0)
        answer(engine, [list(range(60, 130))], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(engine.pool.headless) < 3, "the prompt has left the device"
        drafts = Drafts(engine)
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
        assert len(engine.pool.headless) >= 8
    assert lengths(drafts)


def test_ranks_pause_together(target: Path, head: str, tokens: list[int]) -> None:
    with colocated(config(target, head, tp=2)) as engine:
        pause(engine, 12)
        drafts = Drafts(engine)
        assert answer(engine, [PROMPT], PARAMS)[0].token_ids == tokens
    assert lengths(drafts)


def test_a_head_that_costs_more_than_it_spares_is_paused(target: Path, head: str) -> None:
    """Its weights are random; steps take 10 ms, and the head 9."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=90, ignore_eos=True)
    with colocated(config(target)) as engine:
        (plain,) = answer(engine, [PROMPT], params)
    with colocated(config(target, head)) as engine:
        speculation, drafts = engine.scheduler.speculation, Drafts(engine)
        assert speculation is not None
        observe, proposer = speculation.observe, speculation._proposers[-1]
        timed: Any = lambda batch, _: observe(batch, 0.010)  # noqa: E731
        speculation.observe = timed  # type: ignore[method-assign]
        proposer.take_seconds = lambda: 0.009  # type: ignore[attr-defined]
        assert answer(engine, [PROMPT], params)[0].token_ids == plain.token_ids
        load = engine.load().speculation
    assert load is not None
    (paused,) = load.paused
    assert paused.spent_s > paused.spared_s
    assert not [length for length in lengths(drafts) if length > len(PROMPT) + 70]
