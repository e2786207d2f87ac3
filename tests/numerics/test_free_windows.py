"""Models whose windows free their KV: the tokens of transformers, in caches that would not hold the sequences whole."""

from __future__ import annotations

from typing import Any

import pytest

from protos.errors import Misconfigured
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from tests.numerics.moving import moved, pulled, two
from workers.build_rank import open_rank
from workers.parallel.group import Solo
from workers.worker_config import KVDtype, WorkerConfig

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
                assert [output.token_ids for output in answer(engine, PROMPTS, PARAMS)] == expected
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
        assert [output.token_ids for output in answer(engine, PROMPTS, PARAMS)] == expected


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
            updates = [update for output in answer(engine, PROMPTS, params) for update in output.updates]
            answers.append([(update.token_ids, update.logprobs) for update in updates])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["by-layer-types", "all-windowed"])
def test_a_sequence_moves_and_a_prefix_is_pulled_with_their_windows(checkpoint: Checkpoint, name: str) -> None:
    family, overrides, *_ = MODELS[name]
    folder, model = checkpoint(family, **overrides)
    prompt = PROMPTS[3]
    (expected,) = oracle_answers(model, [prompt], 24)
    config = WorkerConfig(model=str(folder), block_size=4, device="cpu", num_blocks=200, prefill_chunk=16)
    with two(config) as (old, new):
        assert old.engine.pool.has_windows
        assert moved(old, new, prompt, PARAMS, num_before=5) == expected
        assert new.engine.load().transfer_bytes < old.rank.layout.block_bytes * len(prompt) // 4
        assert old.engine.load().num_moved == 1
    with two(config) as (old, new):
        assert pulled(old, new, prompt, PARAMS) == (expected, 100)


@pytest.mark.parametrize(("name", "tp", "kv_dtype"), [("sinks-and-experts", 2, "auto"), ("by-layer-types", 1, "int8")])
def test_windows_come_back_from_the_host(checkpoint: Checkpoint, name: str, tp: int, kv_dtype: KVDtype) -> None:
    """The log probabilities of a cold cache, to the last bit, on every rank."""
    family, overrides, *_ = MODELS[name]
    folder, _ = checkpoint(family, **overrides)
    settings: Any = {"model": str(folder), "block_size": 4, "max_model_len": 120, "dtype": "bfloat16", "tp": tp}
    config = WorkerConfig(**settings, device="cpu", kv_dtype=kv_dtype, num_blocks=30, host_kv_gib=0.005)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
    with colocated(config) as engine:
        outputs = []
        for prompt in (PROMPTS[3], random_tokens(96, 7), random_tokens(96, 8), PROMPTS[3]):
            (output,) = answer(engine, [prompt], params)
            outputs.append([(update.token_ids, update.logprobs) for update in output.updates])
        assert output.num_cached_tokens == 100
        host = engine.load().host
        assert host is not None
        assert host.num_hit_tokens == 100
    assert outputs[3] == outputs[0]
