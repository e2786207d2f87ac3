"""The bar: greedy tokens equal transformers' for every family, however the engine gets to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protos.values import FinishReason
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from workers.worker_config import WorkerConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}
PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 15, 16, 33, 64, 100, 150)]
NUM_TOKENS = sum(map(len, PROMPTS)) + 64 * len(PROMPTS)
PLENTY, SCARCE = 2 * NUM_TOKENS // 16, NUM_TOKENS // 16 // 2

Oracle = Callable[[str], tuple[str, list[list[int]]]]


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Oracle:
    """`oracle(name)` is (folder, greedy answers)."""
    oracles: dict[str, tuple[str, list[list[int]]]] = {}

    def ask(name: str) -> tuple[str, list[list[int]]]:
        if name not in oracles:
            family, overrides = FAMILIES[name]
            folder, model = checkpoint(family, **overrides)
            oracles[name] = str(folder), oracle_answers(model, PROMPTS)
        return oracles[name]

    return ask


PAIRS = [(1, 16, PLENTY), (1, 512, SCARCE), (2, 16, SCARCE), (2, 512, PLENTY)]
"""Every two of: ranks, tokens of a chunk, blocks."""
SOME = {"llama3": PAIRS, "mistral": PAIRS}  # the windows of the latter free blocks
FEW = [(2, 16, PLENTY)]
"""Other families need only this one: the ways are the engine's. One rank is in test_every_family.py."""


@pytest.mark.parametrize(
    ("family", "tp", "prefill_chunk", "num_blocks"),
    [(family, *way) for family in FAMILIES for way in SOME.get(family, FEW)],
    ids=lambda value: {PLENTY: "plenty", SCARCE: "scarce"}.get(value, str(value)),
)
def test_greedy_tokens_are_the_oracles(
    oracle: Oracle, family: str, tp: int, prefill_chunk: int, num_blocks: int
) -> None:
    """With a cold, then a warm prefix cache. Scarce blocks force preemptions."""
    folder, expected = oracle(family)
    config = WorkerConfig(model=folder, tp=tp, prefill_chunk=prefill_chunk, num_blocks=num_blocks, device="cpu")
    with colocated(config) as engine:
        cold = answer(engine, PROMPTS)
        preemptions, frees = engine.scheduler.num_preemptions, engine.pool.has_windows
        warm = answer(engine, PROMPTS)
    assert [output.token_ids for output in cold] == expected
    assert [output.token_ids for output in warm] == expected
    assert all(output.finish_reason is FinishReason.LENGTH for output in cold + warm)
    assert all(output.num_cached_tokens == 0 for output in cold)
    if num_blocks == PLENTY:  # else the cache may be evicted by the time it is asked for
        full = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
        assert [output.num_cached_tokens for output in warm] == full
    assert (preemptions > 0) == (num_blocks == SCARCE and not frees), "windows that free leave enough for all"
