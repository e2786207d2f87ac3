"""Drafts of a model: the answers are those without, and a target that drafts for itself is always right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint, BatonError, Misconfigured
from protos.values import SamplingParams
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import moved, two
from workers import build_rank
from workers.build_rank import open_rank
from workers.kernels.cpu.native_build import native
from workers.parallel.group import Solo
from workers.speculation.ranks import draft_needs, draft_opening
from workers.speculation.speculation import SpeculationCounts
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
PROMPTS = [list(range(number + 3, number + 40)) for number in range(4)]
ALIKE: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
MANY = [
    SamplingParams(temperature=0.0, seed=0, **ALIKE),
    SamplingParams(temperature=0.8, seed=1, **ALIKE),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, logprobs=1, **ALIKE),
    SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, **ALIKE),
]


def config(target: Path, speculate: str = "off", **changes: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"num_blocks": 96, "block_size": 4, "max_drafts": 5, **changes}
    return WorkerConfig(model=str(target), device="cpu", dtype="float32", speculate=speculate, **sizes)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with colocated(config(target)) as engine:
        return tokens(engine, MANY)


def counts_of(engine: Any) -> SpeculationCounts:
    counts: SpeculationCounts = engine.scheduler.speculation.counts
    return counts


def tokens(engine: Any, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in answer(engine, PROMPTS, params)]


@pytest.mark.parametrize(
    ("changes", "num_drafted"),
    [
        ({}, 96),
        ({"num_blocks": 40}, 85),  # preemption
        ({"max_num_batched_tokens": 12, "prefill_chunk": 7, "max_num_seqs": 4}, 40),  # prompts and drafts share steps
        ({"tp": 2}, 96),
    ],
)
def test_a_target_drafting_for_itself_is_always_right(
    target: Path, plain: list[list[int]], changes: dict[str, Any], num_drafted: int
) -> None:
    """Four answers of 30 tokens with five drafts a step. These engines measure no time, so all drafts are made."""
    with colocated(config(target, f"model:{target}", **changes)) as engine:
        assert tokens(engine, MANY) == plain
        counts = counts_of(engine)
        assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in changes)
    assert counts.num_drafted == counts.num_accepted >= num_drafted


def test_a_prefix_hit_includes_the_draft_models_kv(target: Path) -> None:
    params = [SamplingParams(temperature=0.8, seed=7, max_tokens=25, ignore_eos=True)] * len(PROMPTS)
    with colocated(config(target, f"model:{target}")) as engine:
        first = tokens(engine, params)
        again = answer(engine, PROMPTS, params)
        counts = counts_of(engine)
    assert [output.token_ids for output in again] == first
    assert all(output.num_cached_tokens >= 36 for output in again)
    assert counts.num_drafted == counts.num_accepted > 100


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_an_unrelated_draft_model_changes_only_the_time(
    target: Path, plain: list[list[int]], tmp_path: Path, family: str
) -> None:
    """With heads of another size, and with windows."""
    make_checkpoint(family, tmp_path)
    with colocated(config(target, f"model:{tmp_path}")) as engine:
        assert tokens(engine, MANY) == plain
        counts = counts_of(engine)
    assert counts.num_drafted > 50 * counts.num_accepted / 10


def test_a_target_with_windows_keeps_the_blocks_behind_them(tmp_path: Path, target: Path) -> None:
    make_checkpoint("gemma2", tmp_path)
    with colocated(config(tmp_path)) as engine:
        plain = tokens(engine, MANY)
    with colocated(config(tmp_path, f"model:{target}")) as engine:
        assert not engine.pool.has_windows
        assert tokens(engine, MANY) == plain


def test_a_moved_sequence_is_drafted_for_at_its_new_worker(target: Path) -> None:
    """The draft model computes the prompt there: its KV does not move."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    with colocated(config(target)) as engine:
        (plain,) = answer(engine, [PROMPTS[0]], params)
    with two(config(target, f"model:{target}", max_drafts=1)) as (old, new):
        assert moved(old, new, PROMPTS[0], params, num_before=9) == plain.token_ids
        counts = counts_of(new.engine)
    assert counts.num_drafted == counts.num_accepted > 8


def tiny(folder: Path, **changes: Any) -> Path:
    make_checkpoint("llama", folder, **changes)
    return folder


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("model:", Misconfigured, "name the checkpoint"),
        ("model:/nowhere", BadCheckpoint, "/nowhere"),
        ("model:{}", Misconfigured, "has 96 tokens"),
    ],
)
def test_an_unfit_draft_model_is_refused_with_the_reason(
    target: Path, tmp_path: Path, mode: str, error: type[BatonError], words: str
) -> None:
    path = tiny(tmp_path, vocab_size=96) if "{}" in mode else tmp_path
    with pytest.raises(error, match=words):
        open_rank(config(target, mode.format(path)), Solo())


@pytest.mark.parametrize("text", ["{", "[]", '{"added_tokens": [{}]}', '{"model": {"vocab": [[]]}}'])
def test_a_draft_models_damaged_tokenizer_is_named(target: Path, tmp_path: Path, text: str) -> None:
    tiny(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json of .* download it again"):
        draft_needs._tokens(tmp_path)


def test_a_draft_model_for_which_there_is_no_memory_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_opening, "free_ram_bytes", lambda: 1000)
    with pytest.raises(
        Misconfigured, match=r"speculate is model:.*: its weights take .* choose a smaller one"
    ) as caught:
        open_rank(config(target, f"model:{target}"), Solo())
    assert caught.value.param == "speculate"


def test_a_gpu_without_room_for_a_draft_model_is_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build_rank, "open_drafting", full)
    with pytest.raises(Misconfigured, match="does not fit into the GPU's memory beside") as caught:
        open_rank(config(target, f"model:{target}"), Solo())
    assert caught.value.param == "speculate"


def test_steps_ahead_of_a_draft_model_are_refused(target: Path) -> None:
    with pytest.raises(Misconfigured, match="steps_in_flight = 1"):
        open_rank(config(target, f"model:{target}", steps_in_flight=1), Solo())
