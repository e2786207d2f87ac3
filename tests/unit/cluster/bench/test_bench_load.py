"""Which requests a run is made of, and which tokens they have."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.bench_load import (
    Lengths,
    PrefixSpan,
    WorkloadItem,
    fitting,
    read_trace,
    synthetic,
    with_poisson_arrivals,
    without_arrivals,
)
from cluster.bench.prompts import Prompts
from protos.errors import Misconfigured


def lengths(text: str) -> Lengths:
    return Lengths.parse(text, param="workload.input_len")


def line(timestamp: float = 0, tokens: int = 600, output: int = 8, ids: tuple[Any, ...] = (0, 1)) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return path


def test_fixed_lengths_are_exact() -> None:
    items = synthetic(3, prompts=lengths("256"), outputs=lengths("64"), seed=0)
    assert [(item.num_prompt, item.num_output, item.due_s) for item in items] == [(256, 64, None)] * 3


def test_ranges_reach_both_ends_and_the_same_seed_says_the_same() -> None:
    items = synthetic(200, prompts=lengths("3:5"), outputs=lengths("1:2"), seed=7)
    assert {item.num_prompt for item in items} == {3, 4, 5}
    assert {item.num_output for item in items} == {1, 2}
    assert items == synthetic(200, prompts=lengths("3:5"), outputs=lengths("1:2"), seed=7)
    assert items != synthetic(200, prompts=lengths("3:5"), outputs=lengths("1:2"), seed=8)


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "5:3", "0:4", "1:2:3", "2.5"])
def test_bad_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        lengths(text)
    assert caught.value.param == "workload.input_len"


def test_poisson_arrivals_start_at_once_and_keep_their_rate() -> None:
    items = with_poisson_arrivals(
        synthetic(4000, prompts=lengths("1"), outputs=lengths("1"), seed=0), rate=20.0, seed=1
    )
    due = [item.due_s for item in items if item.due_s is not None]
    gaps = [after - before for before, after in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert due[0] == 0.0
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert variance == pytest.approx(mean**2, rel=0.15), "the mark of exponential gaps"


def test_a_trace_keeps_its_lengths_and_times(tmp_path: Path) -> None:
    items = read_trace(write(tmp_path, line(5000), line(6500, 512, 3, (0,))))
    assert [(item.num_prompt, item.num_output, item.due_s) for item in items] == [(600, 8, 0.0), (512, 3, 1.5)]
    assert [item.due_s for item in without_arrivals(items)] == [None, None]


def test_scale_shortens_prompts_and_answers_and_speed_the_time(tmp_path: Path) -> None:
    [first, second] = read_trace(write(tmp_path, line(0), line(1000, 600, 1)), scale=0.25, speed=4.0)
    assert [span.num_tokens for span in first.spans] == [128, 22]
    assert (first.num_output, second.num_output, second.due_s) == (2, 1, 0.25)


def test_equal_hash_ids_are_equal_prefixes(tmp_path: Path) -> None:
    lines = [line(ids=(0, 1)), line(ids=(0, 2)), line(ids=(3, 1)), line(tokens=1100, ids=(0, 1, 4))]
    prompts = Prompts(seed=0, vocab_size=32000)
    first, two, three, four = (prompts.ids(item.spans) for item in read_trace(write(tmp_path, *lines), scale=0.125))
    assert first[:64] == two[:64] == four[:64]
    assert first[64:] == four[64:75], "a longer part of a block begins like a shorter one"
    assert first[64:] != two[64:]
    assert first[:64] != three[:64]


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, line(0), line(1), line(2)), limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{", "line 2"),
        ("[]", "hash_ids"),
        ("", "line 2"),
        ({"timestamp": 0}, "input_length"),
        (line(tokens=600, ids=(0,)), "1 hash_ids for 600 tokens: give 2"),
        (line(tokens=500, ids=(0, 1)), "2 hash_ids for 500 tokens: give 1"),
        (line(tokens=0, ids=()), "input_length"),
        (line(output=-1), "output_length"),
        (line(output=0), "output_length"),
        (line() | {"output_length": 2.9}, "output_length"),
        (line() | {"input_length": 512.5}, "input_length"),
        (line(ids=("a", 1)), "hash_ids"),
        (line(timestamp=-1), "timestamp"),
        ({**line(), "timestamp": "5"}, "timestamp"),
        ({**line(), "input_length": float("inf")}, "line 2"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, bad: Any, named: str) -> None:
    with pytest.raises(Misconfigured, match=r"line 2") as caught:
        read_trace(write(tmp_path, line(0), bad))
    assert named in caught.value.message


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="line 2: its timestamp"):
        read_trace(write(tmp_path, line(10), line(9)))


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no request in it: give a line for each"):
        read_trace(write(tmp_path))
    with pytest.raises(Misconfigured, match=r"missing\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")


def test_requests_beyond_the_context_are_left_out_and_counted() -> None:
    items = [
        WorkloadItem(index=i, spans=(PrefixSpan(key=(0, i), num_tokens=n),), num_output=10)
        for i, n in enumerate((80, 90, 91))
    ]
    assert fitting(items, 100) == (items[:2], 1)
    assert fitting(items, None) == (items, 0)
    with pytest.raises(Misconfigured, match="the shortest: 90 tokens"):
        fitting(items, 50)


def test_prompts_are_random_repeatable_and_without_special_tokens() -> None:
    spans = [PrefixSpan(key=(0, 1), num_tokens=5000)]
    ids = Prompts(seed=3, vocab_size=4000).ids(spans)
    assert len(ids) == 5000
    assert ids == Prompts(seed=3, vocab_size=4000).ids(spans)
    assert ids != Prompts(seed=4, vocab_size=4000).ids(spans)
    assert 400 <= min(ids) < 410, "the first tenth is left out, the rest is used"
    assert 3590 <= max(ids) < 3600


def test_the_first_prompt_is_the_same_on_every_machine() -> None:
    assert Prompts(seed=0, vocab_size=None).ids([PrefixSpan(key=(0, 0), num_tokens=4)]) == [237, 425, 296, 609]


def test_words_stand_for_tokens_and_share_prefixes_too() -> None:
    prompts = Prompts(seed=0, vocab_size=None)
    shared = PrefixSpan(key=(1, 0), num_tokens=6)
    words = prompts.text([shared, PrefixSpan(key=(0, 1), num_tokens=4)]).split(" ")
    two = prompts.text([shared, PrefixSpan(key=(0, 2), num_tokens=4)]).split(" ")
    assert (len(words), words[:6]) == (10, two[:6])
    assert words != two
