"""The same engine on a GPU: greedy tokens equal transformers', the cache fills the card, ranks meet over NCCL."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, oracle_answers
from workers.config import WorkerConfig
from workers.engine.build import open_rank
from workers.parallel.group import Solo
from workers.parallel.ranks import agree, find_store, meet, open_store

pytestmark = pytest.mark.gpu

PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 15, 16, 33, 64, 100, 150)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("prefill_chunk", "num_blocks"), [(16, 128), (512, 128), (16, 18)])
def test_greedy_tokens_are_the_oracles(
    checkpoint: Checkpoint, family: str, prefill_chunk: int, num_blocks: int
) -> None:
    folder, oracle = checkpoint(family)
    expected = oracle_answers(oracle, PROMPTS)
    config = WorkerConfig(model=str(folder), device="cuda", prefill_chunk=prefill_chunk, num_blocks=num_blocks)
    with colocated(config) as engine:
        assert [one.token_ids for one in answer(engine, PROMPTS)] == expected
        assert [one.token_ids for one in answer(engine, PROMPTS)] == expected


def test_the_cache_fills_what_the_largest_step_leaves(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("llama")
    rank = open_rank(WorkerConfig(model=str(folder), device="cuda", memory_fraction=0.5), Solo())
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.4 * total < rank.storage.num_bytes < 0.5 * total


def _sum_over_nccl(rank: int, port: int) -> tuple[float, bool]:
    # NCCL takes two processes on one GPU only for two hosts'.
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = open_store("127.0.0.1", port) if rank == 0 else find_store("127.0.0.1", port)
    group = meet(store, rank=rank, size=2, name="w0", device="cuda", timeout_s=60.0)
    total = group.all_reduce(torch.full((4,), rank + 1.0, device="cuda")).sum().item()
    agreed = agree(group, rank == 0, "cuda")
    group.broadcast("done")
    group.close()
    return total, agreed


def test_two_ranks_meet_over_nccl() -> None:
    port = open_store("127.0.0.1").port
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_sum_over_nccl, range(2), [port, port]))
    assert results == [(12.0, False), (12.0, False)]
