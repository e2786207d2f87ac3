"""Families that are specs over the stack, through the whole engine, over ranks, and quantised. Logits of all their
options: test_families.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from tests.numerics.paged import PagedRun, in_chunks
from tests.numerics.test_tensor_parallel import on_ranks
from workers.config import WorkerConfig
from workers.models.loader import load_model
from workers.parallel.group import TensorParallel

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "phi3": PARTIAL,
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 5},
    "cohere2": {},
}
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 70)]
NUM_ANSWER = 20


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_the_oracles_cold_and_warm(family: str, checkpoint: Checkpoint) -> None:
    """In chunks of 16; the second time from the prefix cache. Windows are shorter than a block."""
    folder, model = checkpoint(family, **MODELS[family])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True)
    expected = oracle_answers(model, PROMPTS, NUM_ANSWER)
    config = WorkerConfig(model=str(folder), prefill_chunk=16, num_blocks=30, device="cpu")
    with colocated(config) as engine:
        cold = answer(engine, PROMPTS, params)
        warm = answer(engine, PROMPTS, params)
    assert [one.token_ids for one in cold] == expected
    assert [one.token_ids for one in warm] == expected
    assert [one.num_cached_tokens for one in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.parametrize("tp", [2, 4])
@torch.no_grad()
def test_logits_do_not_depend_on_the_number_of_ranks(tp: int, checkpoint: Checkpoint) -> None:
    """All families in one group of ranks; four ranks copy each of two key/value heads."""
    folders = {family: checkpoint(family, **overrides) for family, overrides in MODELS.items()}
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> dict[str, torch.Tensor]:
        return {
            family: in_chunks(PagedRun(load_model(folder, parallel=group)), tokens, [24, 14], prompt_len=38)
            for family, (folder, _) in folders.items()
        }

    every_rank = on_ranks(tp, program)
    for family, (_, oracle) in folders.items():
        for logits in every_rank:
            assert torch.equal(logits[family], every_rank[0][family])
        assert_close(every_rank[0][family], oracle(torch.tensor([tokens])).logits[0])
