"""Answers with drafts are those without, over sampling options, grammars, preemption and kinds of caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speculation.identity import compare
from benchmarks.speculation.known_drafter import KnownAnswers
from protos.values import GenerateRequest, SamplingParams
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.constrained import EOS, VOCAB_SIZE, write_tokenizer
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import moved, two
from workers.kernels.cpu.native_build import native
from workers.speculation.speculation import Speculation
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")
HALF_RIGHT = 0.5


def spelling(folder: Path) -> Path:
    make_checkpoint("llama", folder, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    write_tokenizer(folder)
    return folder


def drafted(engine: Any, answers: dict[str, list[int]], right: float = HALF_RIGHT) -> Speculation:
    vocab_size = engine.scheduler.config.vocab_size
    return Speculation([KnownAnswers(answers, right=right, vocab_size=vocab_size)], max_drafts=6)


def grows_to_3_blocks(number: int) -> GenerateRequest:
    """The prompt has one block, and no token but the 40th ends the answer."""
    sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=40, ignore_eos=True)
    return GenerateRequest(request_id=f"grows {number}", prompt_ids=(3 + number, 4, 5, 6), sampling=sampling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matrix_of_requests_has_the_answers_of_no_speculation(tmp_path: Path, dtype: Any) -> None:
    ways = {"own": None, "half right": HALF_RIGHT}
    growing = [grows_to_3_blocks(number) for number in range(4)]  # 12 blocks, of 6
    plain, own, half_right = compare(spelling(tmp_path), dtype, 28, before=growing, num_blocks=6, proposers=ways)
    assert (own.different, half_right.different) == ((), ())
    assert min(case.num_preemptions for case in (plain, own, half_right)) > 0
    assert own.num_drafted > 100
    assert half_right.num_accepted > 50


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"kv_dtype": "int8"}), ("llama", {"tp": 2}), ("gemma2", {}), ("qwen3_moe", {}), ("deepseek_v2", {})],
)
def test_drafts_change_no_answer_of_other_caches_and_layers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """8 bits, several ranks, windows whose pages are freed, experts, latents."""
    make_checkpoint(family, tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cpu", dtype="float32", num_blocks=64, block_size=4, **changes)
    prompts = [list(range(number + 3, number + 20)) for number in range(3)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
    with colocated(config) as engine:
        engine.scheduler.speculation = None
        plain = answer(engine, prompts, params)
    with colocated(config) as engine:
        continuations = {str(number): output.token_ids for number, output in enumerate(plain)}
        engine.scheduler.speculation = speculation = drafted(engine, continuations)
        again = answer(engine, prompts, params)
    assert [output.token_ids for output in again] == [output.token_ids for output in plain]
    assert speculation.counts.num_accepted > 10


@pytest.mark.parametrize("num_before", [9, 25])
def test_a_moved_speculating_sequence_keeps_its_tokens(tmp_path: Path, num_before: int) -> None:
    make_checkpoint("llama", tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cpu", dtype="float32", num_blocks=64, block_size=4)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    prompt = list(range(3, 20))
    with colocated(config) as engine:
        engine.scheduler.speculation = None
        (plain,) = answer(engine, [prompt], params)
    with two(config) as (old, new):
        for worker in (old, new):
            speculation = drafted(worker.engine, {"r": plain.token_ids})
            worker.engine.scheduler.speculation = speculation
        assert moved(old, new, prompt, params, num_before=num_before) == plain.token_ids
        assert speculation.counts.num_accepted > 0
