"""A CUDA graph captured for R decoding rows is right for whatever lengths the next steps have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protos.values import KVLayout
from tests.kernels.conftest import DEVICE, assert_near, normal
from workers.attention.backend import AttentionInputs, AttentionOptions, GroupTables
from workers.attention.paged import PagedAttention
from workers.kernels import twins
from workers.kernels.paged_decode import paged_decode
from workers.kv.kv_storage import KVStorage

SCALE = 0.3
BLOCK_SIZE = 16


class Step:
    """R rows of one token over their own pages; tables and queries lie in the same place at every step."""

    def __init__(self, num_rows: int, most: int) -> None:
        layout = KVLayout.dense(num_layers=1, num_kv_heads=2, head_dim=32, block_size=BLOCK_SIZE, dtype="float32")
        blocks = -(-most // BLOCK_SIZE)
        self.storage = KVStorage(layout, num_blocks=num_rows * blocks, device=DEVICE)
        self.storage.data.copy_(normal(*self.storage.data.shape, dtype=torch.float32))
        self.tables_SB = torch.arange(num_rows * blocks, dtype=torch.int32, device=DEVICE).view(num_rows, blocks)
        self.q_TND = normal(num_rows, 4, 32, dtype=torch.float32, seed=1)

    def inputs(self, lens: tuple[int, ...]) -> AttentionInputs:
        unused = torch.zeros(len(lens), dtype=torch.int64, device=DEVICE)
        return AttentionInputs(
            positions_T=unused,
            query_starts=tuple(range(len(lens) + 1)),
            context_lens=lens,
            tables=(GroupTables(slots_T=unused, block_tables_SB=self.tables_SB),),
            max_query=1,
            max_context=max(lens),
        )

    def exact(self, lens: tuple[int, ...], window: int | None) -> torch.Tensor:
        return twins.paged_attention(
            self.q_TND.double().cpu(),
            self.storage.keys(0).double().cpu(),
            self.storage.values(0).double().cpu(),
            query_starts=tuple(range(len(lens) + 1)),
            context_lens=lens,
            block_tables_SB=self.tables_SB.cpu(),
            scale=SCALE,
            window=window,
        )


LENGTHS = ((300, 5, 17), (1, 290, 16), (40, 40, 300), (300, 300, 300))


@pytest.mark.parametrize("window", [None, 50])
def test_the_same_launches_serve_other_lengths(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the launches' arguments, by address. Contexts are split as on a large device."""
    step = Step(3, 300)
    backend = PagedAttention(step.storage)
    backend._num_multiprocessors = 8
    launches: list[Callable[[], None]] = []

    def recorded(*tensors: torch.Tensor, **options: Any) -> None:
        launches.append(lambda: paged_decode(*tensors, **options))
        paged_decode(*tensors, **options)

    monkeypatch.setattr("workers.attention.paged.paged_decode", recorded)
    backend.begin(step.inputs(LENGTHS[0]))
    out_TND = backend.attend(0, step.q_TND, AttentionOptions(scale=SCALE, window=window))
    for lens in LENGTHS:
        backend.begin(step.inputs(lens))
        out_TND.fill_(float("nan"))
        launches[0]()
        assert_near(out_TND, step.exact(lens, window))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_a_captured_graph_serves_other_lengths(window: int | None) -> None:
    step = Step(3, 300)
    backend = PagedAttention(step.storage)
    backend.begin(step.inputs(LENGTHS[0]))
    backend.attend(0, step.q_TND, AttentionOptions(scale=SCALE, window=window))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TND = backend.attend(0, step.q_TND, AttentionOptions(scale=SCALE, window=window))
    for lens in LENGTHS:
        backend.begin(step.inputs(lens))
        out_TND.fill_(float("nan"))
        graph.replay()
        assert_near(out_TND, step.exact(lens, window))
