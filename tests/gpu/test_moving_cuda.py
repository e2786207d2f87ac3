"""A sequence moves, and a prefix is pulled, between two workers on a GPU: the tokens are those of one that stayed.

Lanes are queues here, for one process has both workers. Left out where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import GREEDY, answer, colocated
from tests.numerics.moving import moved, pulled, two
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.gpu

PROMPT = tuple(torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(5)).tolist())
NUM_BEFORE = 20


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    make_checkpoint("llama", tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = False
    return WorkerConfig(model=str(tmp_path), device="cuda", dtype="float32", num_blocks=64)


def test_a_sequence_that_moves_goes_on_as_it_would_have(config: WorkerConfig) -> None:
    with colocated(config) as engine:
        (expected,) = answer(engine, [PROMPT])
    with two(config) as (old, new):
        assert moved(old, new, PROMPT, GREEDY, num_before=NUM_BEFORE) == expected.token_ids
        assert old.engine.load().num_moved == 1


def test_a_pulled_prefix_equals_a_computed_one(config: WorkerConfig) -> None:
    with colocated(config) as engine:
        (expected,) = answer(engine, [PROMPT])
    with two(config) as (old, new):
        tokens, num_shared = pulled(old, new, PROMPT, GREEDY)
        assert tokens == expected.token_ids
        assert new.engine.load().num_pulled_tokens == num_shared
