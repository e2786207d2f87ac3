"""A model cut over ranks computes what it computes alone. The ranks are threads, each with groups of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from protos.errors import Misconfigured, WorkerLost
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from workers.models.loader import load_model
from workers.parallel.group import RankGroup, TensorParallel

T = TypeVar("T")


def on_ranks(size: int, program: Callable[[TensorParallel], T]) -> list[T]:
    """The result of `program` on each rank, in rank order."""
    store = HashStore()

    def run(rank: int) -> T:
        group = RankGroup(store, rank=rank, size=size)
        try:
            return program(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize(
    ("family", "tp", "overrides"),
    [
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", 2, {"vocab_size": 161}),
        ("qwen3", 2, {"num_key_value_heads": 1}),
        ("mistral", 4, {"vocab_size": 163}),
        ("deepseek_v2", 4, {}),
    ],
    ids=["biases", "tied-uneven-vocab", "one-kv-head-copied", "kv-heads-copied-in-pairs", "latents-copied"],
)
@torch.no_grad()
def test_logits_do_not_depend_on_the_number_of_ranks(
    family: str, tp: int, overrides: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder, oracle = checkpoint(family, **overrides)
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> torch.Tensor:
        return in_chunks(PagedRun(load_model(folder, parallel=group)), tokens, [24, 14], prompt_len=38)

    every_rank = on_ranks(tp, program)
    for logits in every_rank:
        assert torch.equal(logits, every_rank[0])
    assert_close(every_rank[0], oracle(torch.tensor([tokens])).logits[0])


def test_sums_made_in_halves_are_the_same_sums(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these steps are long enough to overlap, as on a GPU, some are not."""
    monkeypatch.setattr("workers.models.layers.linear_layers.OVERLAPPED_TOKENS", 10)
    folder, oracle = checkpoint("llama", attention_bias=True)
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> torch.Tensor:
        return in_chunks(PagedRun(load_model(folder, parallel=group)), tokens, [25, 11, 2], prompt_len=38)

    for logits in on_ranks(2, program):
        with torch.no_grad():
            assert_close(logits, oracle(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"head_dim": 32}),
        ("cohere2", {}),
        ("gemma2", {"head_dim": 32}),
        ("starcoder2", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {"num_key_value_heads": 4, "decoder_sparse_step": 2}),
        ("deepseek_v3", {}),
    ],
)
def test_compiled_layers_add_up_the_ranks_sums(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """With `--tp 2` a step's layers ran one by one."""
    make_checkpoint(family, tmp_path, **overrides)
    rows = [[("one", random_tokens(24), 24), ("two", [5, 6], 2)], [("one", [7], 24), ("two", [8], 2)]]

    def program(group: TensorParallel) -> list[list[torch.Tensor]]:
        decoder = load_model(tmp_path, dtype="bfloat16", parallel=group, packed=True)
        runs = [PagedRun(decoder, fused=fused) for fused in (False, True)]
        assert runs[1].through is not None, "this model should have been fused"
        return [[logits for step in rows for logits in run.step(step)] for run in runs]

    for one_by_one, fused in on_ranks(2, program):
        assert all(map(torch.equal, one_by_one, fused))


def test_norms_over_all_heads_run_layer_by_layer_over_ranks(tmp_path: Path) -> None:
    make_checkpoint("olmo2", tmp_path)

    def program(group: TensorParallel) -> bool:
        return PagedRun(load_model(tmp_path, parallel=group, packed=True), fused=True).through is None

    assert on_ranks(2, program) == [True, True]


def test_compiled_layers_end_when_a_rank_is_gone(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    left = threading.Event()

    def program(group: TensorParallel) -> str:
        run = PagedRun(load_model(tmp_path, parallel=group, packed=True), fused=True)
        if group.rank == 1:
            group.close()
            left.set()
            return ""
        left.wait()
        run.logits([("only", random_tokens(5), 5)], [])
        return "it went on"

    with pytest.raises(WorkerLost):
        on_ranks(2, program)


def test_a_chunk_that_wants_no_logits_gets_none(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("llama")

    def program(group: TensorParallel) -> tuple[int, ...]:
        run = PagedRun(load_model(folder, parallel=group))
        return tuple(run.logits([("only", random_tokens(5), 9)], []).shape)

    assert on_ranks(2, program) == [(0, VOCAB_SIZE)] * 2


def test_each_rank_reads_and_keeps_only_its_share(checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint("llama")
    total = sum(parameter.numel() * 4 for parameter in oracle.parameters())

    def program(group: TensorParallel) -> tuple[int, int]:
        seen: list[tuple[int, int]] = []
        run = PagedRun(load_model(folder, parallel=group, on_progress=lambda *bytes_: seen.append(bytes_)))
        assert seen[-1][0] == seen[-1][1]
        return seen[-1][1], run.storage.num_bytes

    alone = PagedRun(load_model(folder)).storage.num_bytes
    for read, cache in on_ranks(2, program):
        assert read < 0.51 * total
        assert cache == alone / 2


@pytest.mark.parametrize(
    ("overrides", "tp"), [({}, 3), ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, 2)]
)
def test_heads_that_cannot_be_shared_evenly_are_refused(
    overrides: dict[str, Any], tp: int, checkpoint: Checkpoint
) -> None:
    folder, _ = checkpoint("llama", **overrides)

    def program(group: TensorParallel) -> None:
        with pytest.raises(Misconfigured, match=f"tp is {tp}: it must") as caught:
            load_model(folder, parallel=group)
        assert caught.value.param == "tp"

    on_ranks(tp, program)


@pytest.mark.parametrize(
    ("family", "tp", "expert_parallel", "overrides"),
    [
        ("mixtral", 2, False, {}),
        ("mixtral", 4, True, {}),
        ("qwen2_moe", 4, False, {"num_key_value_heads": 4, "decoder_sparse_step": 2}),
        ("qwen2_moe", 2, True, {"num_key_value_heads": 4, "decoder_sparse_step": 2}),
        ("qwen3_moe", 3, True, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    ],
    ids=["columns", "whole-uneven", "columns-shared-expert", "whole-shared-expert", "whole-columns-do-not-divide"],
)
@torch.no_grad()
def test_ranks_share_experts_by_columns_or_whole(
    family: str, tp: int, expert_parallel: bool, overrides: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder, oracle = checkpoint(family, **overrides)
    tokens = random_tokens(41)

    def program(group: TensorParallel) -> torch.Tensor:
        model = load_model(folder, parallel=group, expert_parallel=expert_parallel, packed=tp == 4)
        return in_chunks(PagedRun(model, fused=True), tokens, [24, 14], prompt_len=38)

    every_rank = on_ranks(tp, program)
    for logits in every_rank:
        assert torch.equal(logits, every_rank[0])
    assert_close(every_rank[0], oracle(torch.tensor([tokens])).logits[0])
