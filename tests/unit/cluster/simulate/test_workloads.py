"""Generated load: as much as was asked for, with the sharing that its name promises."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.workload import Lengths
from cluster.simulate.workload import (
    GENERATED,
    Load,
    Pace,
    arrivals,
    bursty,
    diurnal,
    fitting,
    generated,
    recorded,
    steady,
)
from protos.errors import Misconfigured

LOAD = Load(num_requests=100, rate=5.0, prompts=Lengths(low=10, high=50), outputs=Lengths(low=5, high=9))


@pytest.mark.parametrize("name", GENERATED)
def test_a_workload_is_its_seed_and_about_as_long_as_asked_for(name: str) -> None:
    made = generated(name, LOAD)
    assert made == generated(name, LOAD)
    assert made != generated(name, replace(LOAD, seed=1))
    assert 100 <= sum(len(session.turns) for session in made) < 110


@pytest.mark.parametrize("pace", [steady, bursty, diurnal])
def test_arrivals_keep_the_mean_rate(pace: Pace) -> None:
    due = list(itertools.takewhile(lambda at_s: at_s < 6000, arrivals(2.0, pace, random.Random(0))))
    assert len(due) / 6000 == pytest.approx(2.0, rel=0.1)


def test_bursts_are_bursts() -> None:
    due = list(itertools.islice(arrivals(5.0, bursty, random.Random(0)), 3000))
    inside = sum(at_s % 60 < 10 for at_s in due)
    assert inside / len(due) == pytest.approx(40 / 60, rel=0.1)


def test_agents_share_their_system_prompts_and_documents_are_asked_about_again() -> None:
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


def test_what_no_worker_can_hold_is_left_out_and_counted() -> None:
    made = generated("conversations", LOAD)
    longest = max(session.num_tokens for session in made)
    kept, num_left_out = fitting(made, longest - 1)
    assert num_left_out >= 1
    assert len(kept) + num_left_out == len(made)
    with pytest.raises(Misconfigured, match="every session is longer"):
        fitting(made, 1)


def test_mistakes_are_named() -> None:
    with pytest.raises(Misconfigured, match="--workload fair"):
        generated("fair", LOAD)
    with pytest.raises(Misconfigured, match="--rate 0"):
        replace(LOAD, rate=0)
