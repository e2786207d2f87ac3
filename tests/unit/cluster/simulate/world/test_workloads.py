"""Generated load: as much as was asked for, with the sharing that its name promises."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.routing.replay import TraceRequest, asked_of
from cluster.bench.bench_load import Lengths
from cluster.simulate.world.simulated_load import (
    ASSISTANT_RATE,
    GENERATED,
    GeneratedLoad,
    Pace,
    SessionLimit,
    arrivals,
    bursty,
    diurnal,
    fitting,
    generated,
    recorded,
    steady,
)
from protos.errors import Misconfigured
from protos.values import BlockHash

LOAD = GeneratedLoad(num_requests=100, rate=5.0, prompts=Lengths(low=10, high=50), outputs=Lengths(low=5, high=9))


@pytest.mark.parametrize("name", GENERATED)
def test_a_workload_is_its_seed_and_as_long_as_asked_for(name: str) -> None:
    made = generated(name, LOAD)
    assert made == generated(name, LOAD)
    assert made != generated(name, replace(LOAD, seed=1))
    for num_requests in (1, 3, 23, 100):
        shorter = generated(name, replace(LOAD, num_requests=num_requests))
        assert sum(len(session.turns) for session in shorter) == num_requests
        assert all(session.turns for session in shorter)
        whole = {session.number: session for session in made}
        for session in shorter:
            assert session == replace(whole[session.number], turns=whole[session.number].turns[: len(session.turns)])


@pytest.mark.parametrize("name", sorted(GENERATED.keys() - {"assistant"}))
def test_only_the_last_conversation_is_cut_short(name: str) -> None:
    made, shorter = generated(name, LOAD), generated(name, replace(LOAD, num_requests=23))
    assert shorter[:-1] == made[: len(shorter) - 1]


@pytest.mark.parametrize("pace", [steady, bursty, diurnal])
def test_arrivals_keep_the_mean_rate(pace: Pace) -> None:
    due = list(itertools.takewhile(lambda at_s: at_s < 6000, arrivals(2.0, pace, random.Random(0))))
    assert len(due) / 6000 == pytest.approx(2.0, rel=0.1)


def test_bursts_are_bursts() -> None:
    due = list(itertools.islice(arrivals(5.0, bursty, random.Random(0)), 3000))
    inside = sum(at_s % 60 < 10 for at_s in due)
    assert inside / len(due) == pytest.approx(40 / 60, rel=0.1)


def test_the_assistant_load_resembles_its_trace() -> None:
    """Mooncake's conversation trace, its first 4,000 requests: prompts of 13,312 tokens on average, 7,884 in the median
    and 94,764 at p99, answers of 347, 2,865 conversations, 33 % of the tokens of prompts seen before."""
    made = generated("assistant", replace(LOAD, num_requests=4000, rate=ASSISTANT_RATE))
    asked = asked_of(made, 512)
    assert len({query.hashes[0] for query in asked if query.hashes}) == 1, "the system prompt"
    assert max(query.num_prompt for query in asked) < 125_000
    prompts = sorted(query.num_prompt for query in asked)
    assert sum(prompts) / len(asked) == pytest.approx(13_312, rel=0.1)
    assert prompts[2000] == pytest.approx(7_884, rel=0.2)
    assert prompts[3960] == pytest.approx(94_764, rel=0.1)
    assert sum(query.num_output for query in asked) / len(asked) == pytest.approx(347, rel=0.05)
    assert asked[-1].at_s == pytest.approx(4000 / ASSISTANT_RATE, rel=0.05)
    assert len(made) == pytest.approx(2865, rel=0.15)
    assert repeated(asked, 512) / sum(prompts) == pytest.approx(0.33, abs=0.04)


def repeated(asked: Sequence[TraceRequest], block_size: int) -> int:
    """Tokens of blocks that an earlier prompt had, which unlimited memory would find."""
    seen: set[BlockHash] = set()
    num_tokens = 0
    for request in asked:
        num_tokens += block_size * sum(block in seen for block in request.hashes)
        seen.update(request.hashes)
    return num_tokens


def test_the_assistant_load_scales_with_its_rate() -> None:
    slow, fast = (generated("assistant", replace(LOAD, rate=rate)) for rate in (ASSISTANT_RATE, 4 * ASSISTANT_RATE))
    assert [session.turns[0].spans for session in slow] == [session.turns[0].spans for session in fast]
    for request, other in zip(slow, fast, strict=True):
        assert request.due_s == pytest.approx(4 * other.due_s)
        assert [turn.pause_s for turn in request.turns] == pytest.approx([4 * turn.pause_s for turn in other.turns])


def test_agents_share_system_prompts_and_documents_recur() -> None:
    for name, kinds in (("agents", 8), ("documents", 20)):
        firsts = {session.turns[0].spans[0].key for session in generated(name, LOAD)}
        assert 1 < len(firsts) <= kinds


def test_a_trace_is_read_and_its_time_can_run_faster(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, %d]}\n'
    file.write_text(line % (0, 2) + line % (4000, 3))
    first, second = recorded(file, speed=2.0)
    assert second.due_s == 2.0
    assert first.turns[0].spans[0] == second.turns[0].spans[0]


@pytest.mark.parametrize("name", ["poisson", "diurnal"])
def test_a_load_that_takes_a_month_of_virtual_time_is_refused(name: str) -> None:
    with pytest.raises(Misconfigured) as refusal:
        generated(name, replace(LOAD, rate=1e-9))
    (least,) = re.findall(r"and (\S+) or more a second", str(refusal.value))
    assert generated(name, replace(LOAD, rate=float(least))), "what it says is possible"
    for rate in (1e-320, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(Misconfigured):
            replace(LOAD, rate=rate)


def test_a_trace_with_a_gap_of_months_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    file.write_text("".join(line % timestamp for timestamp in (0, 4000, 86_400_000 * 100)))
    with pytest.raises(Misconfigured) as refusal:
        recorded(file)
    ((limit, speed),) = re.findall(r"workload.requests = (\d+) or trace_speed = (\S+)", str(refusal.value))
    assert len(recorded(file, limit=int(limit))) == 2
    assert len(recorded(file, speed=float(speed))) == 3


def room(num_tokens: int) -> SessionLimit:
    return SessionLimit(num_tokens=num_tokens, limit="memory")


def test_oversized_sessions_are_left_out_and_counted() -> None:
    made = generated("conversations", LOAD)
    longest = max(session.num_tokens for session in made)
    fitted, left_out = fitting(made, room(longest - 1))
    assert left_out
    assert sorted([*fitted, *left_out], key=made.index) == made
    with pytest.raises(Misconfigured, match="every session is longer"):
        fitting(made, room(1))


def test_mistakes_are_named() -> None:
    with pytest.raises(Misconfigured, match=r"workload\.name"):
        generated("fair", LOAD)
