"""Adapters on a GPU: greedy tokens of merged weights, beside base rows in CUDA graphs. Left out without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.plain_adapters import with_adapter, write_adapter
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.engines import colocated, oracle_answers
from tests.numerics.test_adapter_engine import NUM_TOKENS, PROMPTS, answers_of, load
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.gpu


def test_greedy_tokens_equal_those_of_merged_weights(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_checkpoint("llama", tmp_path / "model")
    adapter = write_adapter(tmp_path / "model", tmp_path / "adapter", rank=8)
    expected = {"": oracle_answers(model, PROMPTS, NUM_TOKENS)}
    expected["a"] = oracle_answers(with_adapter(model, adapter), PROMPTS, NUM_TOKENS)
    config = WorkerConfig(model=str(tmp_path / "model"), device="cuda", dtype="float32", num_blocks=128)
    with colocated(config) as engine:
        ids = {"a": load(engine, "a", adapter), "": ""}
        outputs = answers_of(engine, list(ids.values()))
        for name, adapter_id in ids.items():
            assert [output.token_ids for output in outputs[adapter_id]] == expected[name]
