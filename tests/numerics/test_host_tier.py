"""Blocks that a small cache has evicted come back from the host bit for bit, on every rank, and change no answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvtransfer.hashing import chain_hashes
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, random_tokens
from tests.numerics.engines import answer, colocated, ranks_of
from workers.build_rank import build_engine, follow_rank0, make_transfer
from workers.parallel.ranks import Leader
from workers.scheduling.role import Role
from workers.worker_config import WorkerConfig

FEW = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((100, 97, 120, 64))]


def test_a_small_cache_with_a_host_tier_answers_as_a_large_one(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("qwen3")
    with colocated(WorkerConfig(model=str(folder), num_blocks=100)) as large:
        expected = [answer(large, [prompt], FEW)[0].token_ids for prompt in PROMPTS]
    config = WorkerConfig(model=str(folder), num_blocks=10, max_model_len=160, host_kv_gib=0.01, prefill_chunk=32)
    with colocated(config) as small:
        for prompt, tokens in zip(PROMPTS * 2, expected * 2, strict=True):
            assert answer(small, [prompt], FEW)[0].token_ids == tokens
        assert [output.token_ids for output in answer(small, PROMPTS, FEW)] == expected
        load = small.load().host
        assert load is not None
        assert load.num_hit_tokens > 300
        assert load.load_s > 0


@pytest.mark.parametrize("tp", [1, 2])
@torch.no_grad()
def test_evicted_blocks_come_back_bit_for_bit(checkpoint: Checkpoint, tp: int) -> None:
    folder, _ = checkpoint("llama")
    config = WorkerConfig(
        model=str(folder), tp=tp, num_blocks=10, max_model_len=160, host_kv_gib=0.01, dtype="bfloat16"
    )
    prompt = PROMPTS[0]
    hashes = chain_hashes(prompt, config.block_size)
    with ranks_of(config) as ranks, ThreadPoolExecutor(2) as threads:
        followers = [threads.submit(follow_rank0, rank, make_transfer(rank)) for rank in ranks[1:]]
        leader = Leader(ranks[0].group)
        engine = build_engine(ranks[0], leader, lambda _: Role(), incarnation=1, clock=lambda: 0.0)
        first = answer(engine, [prompt], FEW)[0]
        before = [rank.storage.gather(engine.pool.match(hashes)) for rank in ranks]
        assert before[0].shape[2] == 6
        for other in (random_tokens(150, 7), random_tokens(150, 8)):
            answer(engine, [other], FEW)
        assert engine.pool.match(hashes) == []
        again = answer(engine, [prompt], FEW)[0]
        after = [rank.storage.gather(engine.pool.match(hashes)) for rank in ranks]
        leader.close()
        for follower in followers:
            follower.result()
    assert again.num_cached_tokens == 96
    assert again.token_ids == first.token_ids
    for stored, came in zip(before, after, strict=True):
        assert torch.equal(stored, came)
    assert len({float(rank.float().sum()) for rank in before}) == tp, "ranks hold heads of their own"
