"""Logprobs, penalties, seeds and varying ropes, against transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from protos.values import FinishReason, SamplingParams
from tests.numerics.checkpoints import VOCAB_SIZE
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import GREEDY, answer, colocated, oracle_answers
from workers.worker_config import WorkerConfig

PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 15, 16, 33, 64, 100, 150)]
VARYING_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    },
    "longrope": {
        "max_position_embeddings": 192,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.05 * pair for pair in range(8)],
            "long_factor": [1.5 + pair for pair in range(8)],
        },
    },
}


def config_of(folder: object, **settings: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {"device": "cpu", "num_blocks": 128, "prefill_chunk": 16}
    return WorkerConfig(model=str(folder), **(defaults | settings))


@pytest.mark.parametrize("name", VARYING_ROPES)
def test_a_rope_that_varies_with_the_prompt(checkpoint: Checkpoint, name: str) -> None:
    """Prompts below and beyond the trained length start alike, and yet share only the cache they may share."""
    folder, oracle = checkpoint("llama", **VARYING_ROPES[name])
    stem = random_tokens(48)
    prompts = [stem[:40], stem + random_tokens(40, seed=1), stem + random_tokens(9, seed=2), stem[:33]]
    expected = [tokens for prompt in prompts for tokens in oracle_answers(copy.deepcopy(oracle), [prompt])]
    with colocated(config_of(folder, max_model_len=160)) as engine:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert answer(engine, [prompt])[0].token_ids == tokens
        assert [output.token_ids for output in answer(engine, prompts)] == expected


@torch.no_grad()
@pytest.mark.parametrize("tp", [1, 2])
def test_logprobs_are_the_oracles(checkpoint: Checkpoint, tp: int) -> None:
    """Prompt and answer logprobs do not depend on sampling. They are requested twice, because a cached prompt has no
    logits."""
    folder, oracle = checkpoint("qwen3")
    wanted = SamplingParams(
        temperature=1.0, top_k=5, seed=3, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    with colocated(config_of(folder, tp=tp)) as engine:
        rounds = [answer(engine, PROMPTS, wanted) for _ in range(2)]
    for prompt, *asked in zip(PROMPTS, *rounds, strict=True):
        for params in asked:
            logits = oracle(torch.tensor([prompt + params.token_ids])).logits[0]
            truth = torch.log_softmax(logits.float(), dim=-1)
            prompt_logprobs = [entry for update in params.updates for entry in update.prompt_logprobs]
            logprobs = [entry for update in params.updates for entry in update.logprobs]
            assert len(prompt_logprobs) == len(prompt) - 1
            assert [entry.chosen.token_id for entry in prompt_logprobs + logprobs] == (prompt + params.token_ids)[1:]
            for position, entry in enumerate(prompt_logprobs + logprobs):
                chosen, num_top = entry.chosen, len(entry.top)
                assert num_top == (2 if position < len(prompt) - 1 else 3)
                assert chosen.logprob == pytest.approx(truth[position, chosen.token_id].item(), abs=1e-3)
                best = truth[position].topk(num_top).values.tolist()
                assert [top.logprob for top in entry.top] == pytest.approx(best, abs=1e-3)


def test_a_repetition_penalty_is_transformers(checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint("llama")
    expected = oracle_answers(oracle, PROMPTS, repetition_penalty=1.3)
    with colocated(config_of(folder)) as engine:
        penalised = answer(engine, PROMPTS, replace(GREEDY, repetition_penalty=1.3))
        plain = answer(engine, PROMPTS)
    assert [output.token_ids for output in penalised] == expected
    assert [output.token_ids for output in plain] != expected


def test_a_seed_gives_the_same_tokens_however_they_are_computed(checkpoint: Checkpoint) -> None:
    """Alone; all together in one chunk; in small chunks, cached, preempted; and on two ranks."""
    folder, _ = checkpoint("llama")
    asked = [
        SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, seed=100 + index, max_tokens=40, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    with colocated(config_of(folder)) as engine:
        alone = [answer(engine, [prompt], [params])[0].token_ids for prompt, params in zip(PROMPTS, asked, strict=True)]
    for settings in ({"prefill_chunk": 512}, {"num_blocks": 18}, {"tp": 2}):
        with colocated(config_of(folder, **settings)) as engine:
            together = answer(engine, PROMPTS, asked)
            again = answer(engine, PROMPTS, asked)
            assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
        assert [output.token_ids for output in together] == alone
        assert [output.token_ids for output in again] == alone


def test_choices_of_one_prompt_differ_by_their_seeds(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("llama")
    asked = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True) for seed in (1, 2, 3, 1)]
    with colocated(config_of(folder)) as engine:
        first, second, third, first_again = (output.token_ids for output in answer(engine, [PROMPTS[5]] * 4, asked))
    assert first == first_again
    assert len({tuple(tokens) for tokens in (first, second, third)}) == 3


def test_an_answer_ends_at_its_stop_token_but_not_before_min_tokens(checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint("llama")
    (expected,) = oracle_answers(oracle, [PROMPTS[4]])
    stop = next(token for index, token in enumerate(expected) if index >= 5 and token not in expected[:index])
    ends = expected.index(stop) + 1
    stopped = replace(GREEDY, stop_token_ids=(stop,))
    with colocated(config_of(folder)) as engine:
        (plain,) = answer(engine, [PROMPTS[4]], stopped)
        (later,) = answer(engine, [PROMPTS[4]], replace(stopped, min_tokens=ends + 3))
    assert plain.token_ids == expected[:ends]
    assert plain.finish_reason is FinishReason.STOP
    assert stop not in later.token_ids[: ends + 3]
    assert len(later.token_ids) > ends + 3


@torch.no_grad()
def test_bfloat16_is_close_to_float32(checkpoint: Checkpoint) -> None:
    """The logprobs of prompts, over the paged cache, within what rounding to 8 bits costs."""
    folder, oracle = checkpoint("llama", initializer_range=0.08)
    wanted = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    with colocated(config_of(folder, dtype="bfloat16")) as engine:
        answers = answer(engine, PROMPTS, wanted)
    for prompt, output in zip(PROMPTS, answers, strict=True):
        assert len(output.token_ids) == 16
        assert all(0 <= token < VOCAB_SIZE for token in output.token_ids)
        truth = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), dim=-1)
        entries = [entry for update in output.updates for entry in update.prompt_logprobs]
        errors = [
            abs(entry.chosen.logprob - truth[position, entry.chosen.token_id].item())
            for position, entry in enumerate(entries)
        ]
        assert max(errors, default=0.0) < 0.1
