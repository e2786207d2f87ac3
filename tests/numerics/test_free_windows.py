"""Models whose windows free their KV: the tokens of transformers, in caches that would not hold the sequences whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.errors import Misconfigured
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from workers.build import open_rank
from workers.config import KVDtype, WorkerConfig
from workers.parallel.group import Solo

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # overrides, groups, and blocks of 8 tokens of a cache that holds fewer than the 128 of one sequence
    "all-windowed": ("mistral", {}, 1, 8),
    "by-layer-types": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "layer_types": LAYER_TYPES},
        3,
        9,
    ),
    "a-window-shorter-than-a-block": ("gemma3", {}, 2, 11),
    "sinks-and-experts": ("gpt_oss", {}, 2, 11),
    "no-rope-where-full": ("cohere2", {"num_hidden_layers": 4, "sliding_window_pattern": 4}, 4, 8),
}
START = random_tokens(40, seed=4)
PROMPTS = [[*START, *random_tokens(length, seed=length)] for length in (1, 9, 30, 64)] + [random_tokens(5, seed=2)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_oracles_in_scarce_and_in_ample_caches(checkpoint: Checkpoint, name: str) -> None:
    """Cold, then with a warm cache; the scarce one could not serve 128 tokens if nothing were freed."""
    family, overrides, num_groups, scarce = MODELS[name]
    folder, model = checkpoint(family, **overrides)
    expected = oracle_answers(model, PROMPTS, 24)
    settings: Any = {"model": str(folder), "block_size": 8, "device": "cpu", "max_model_len": 128}
    for num_blocks, chunk in ((scarce, 16), (100, 512)):
        config = WorkerConfig(**settings, num_blocks=num_blocks, prefill_chunk=chunk)
        with colocated(config) as engine:
            assert engine.pool.windows.num_groups == num_groups
            for _ in range(2):
                assert [one.token_ids for one in answer(engine, PROMPTS, PARAMS)] == expected
            if num_blocks != scarce:
                assert answer(engine, PROMPTS, PARAMS)[2].num_cached_tokens >= 64
    with pytest.raises(Misconfigured, match="max_model_len"):
        open_rank(WorkerConfig(**settings, num_blocks=scarce, free_windows=False), Solo())


def test_steps_in_flight_and_two_ranks_give_the_same(checkpoint: Checkpoint) -> None:
    family, overrides, *_ = MODELS["by-layer-types"]
    folder, model = checkpoint(family, **overrides)
    expected = oracle_answers(model, PROMPTS, 24)
    config = WorkerConfig(
        model=str(folder), block_size=4, device="cpu", num_blocks=60, prefill_chunk=16, tp=2, steps_in_flight=2
    )
    with colocated(config) as engine:
        assert [one.token_ids for one in answer(engine, PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_layers_run_in_one_call_with_tables_of_their_groups(checkpoint: Checkpoint, kv_dtype: KVDtype) -> None:
    family, overrides, *_ = MODELS["by-layer-types"]
    folder, _ = checkpoint(family, **overrides)
    answers = []
    for free_windows in (True, False):
        config = WorkerConfig(
            model=str(folder), dtype="bfloat16", kv_dtype=kv_dtype, num_blocks=60, free_windows=free_windows
        )
        with colocated(config) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
            updates = [update for one in answer(engine, PROMPTS, params) for update in one.updates]
            answers.append([(update.token_ids, update.logprobs) for update in updates])
    assert answers[0] == answers[1]


def test_the_host_tier_keeps_whole_blocks(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    folder: Path = checkpoint("gemma3")[0]
    rank = open_rank(WorkerConfig(model=str(folder), num_blocks=20, host_kv_gib=0.01), Solo())
    assert not rank.layout.frees_blocks
    assert "host tier" in caplog.text
