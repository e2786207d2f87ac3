"""Vectors of prompts are those of transformers' last hidden states, in chunks, in batches and beside answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import GREEDY, answer, colocated
from workers.worker_config import WorkerConfig

PROMPTS = [random_tokens(45), random_tokens(45)[:33] + random_tokens(9, seed=1), random_tokens(1, seed=2)]


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"steps_in_flight": 1}], ids=str)
def test_a_prompt_has_the_vector_of_transformers(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    folder, oracle = checkpoint("llama")
    with torch.no_grad():
        states = [oracle.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    expected = [states_TE[-1] for states_TE in states] + [states_TE.mean(0) for states_TE in states]
    asked = [SamplingParams(max_tokens=1, pooling=pooling) for pooling in ("last", "mean") for _ in PROMPTS]
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=128, prefill_chunk=16, **settings)
    with colocated(config) as engine:
        for _ in range(2):  # the second time the prefix is cached
            answers = answer(engine, [*PROMPTS * 2, PROMPTS[0]], [*asked, GREEDY])
            updates = [output.updates[-1] for output in answers[:-1]]
            for update, vector_E in zip(updates, expected, strict=True):
                assert_close(torch.from_numpy(np.frombuffer(update.embedding, dtype=np.float32).copy()), vector_E)
            assert not answers[-1].updates[0].embedding
        assert updates[0].num_cached_tokens == 32
        assert updates[3].num_cached_tokens == 0, "the mean needs every position"
    assert [len(output.token_ids) for output in answers[:-1]] == [1] * 6


def test_a_decoder_of_transformers_has_them_too(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.served.is_ours", lambda fields: False)
    folder, oracle = checkpoint("llama")
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=128, prefill_chunk=16)
    asked = [SamplingParams(max_tokens=1, pooling=pooling) for pooling in ("last", "mean")]
    with torch.no_grad():
        states_TE = oracle.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0]
    with colocated(config) as engine:
        answers = answer(engine, [PROMPTS[0]] * 2, asked)
    for output, vector_E in zip(answers, (states_TE[-1], states_TE.mean(0)), strict=True):
        assert_close(torch.from_numpy(np.frombuffer(output.updates[-1].embedding, dtype=np.float32).copy()), vector_E)
