"""Blocks leave one cache and land in another: exact copies, and nothing beside them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import DEVICE, normal
from workers.kernels import twins
from workers.kernels.block_copies import gather, scatter


@pytest.mark.parametrize("shape", [(2, 2, 5, 2, 16, 64), (3, 2, 6, 1, 7, 20), (1, 2, 4, 3, 32, 80)])
def test_blocks_are_copied_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source, destination = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    taken, placed = (torch.tensor(ids, device=DEVICE) for ids in ([3, 0, 2], [1, 3, 0]))
    payload = gather(source, taken)
    assert torch.equal(payload, twins.gather(source, taken))
    expected = destination.clone()
    twins.scatter(expected, placed, payload)
    scatter(destination, placed, payload)
    assert torch.equal(destination, expected)


def test_runs_of_any_shape_are_gathered_into_given_memory(dtype: torch.dtype) -> None:
    """Rows of single heads are gathered for a worker with other ranks."""
    rows = normal(2, 2, 12, 50, dtype=dtype)
    ids, memory = torch.tensor([7, 0, 7, 11], device=DEVICE), torch.zeros(2, 2, 4, 50, dtype=dtype, device=DEVICE)
    gather(rows, ids, memory)
    assert torch.equal(memory, rows[:, :, ids])


def test_no_blocks_are_no_launch() -> None:
    cache, ids = normal(2, 2, 3, 1, 4, 8, dtype=torch.float32), torch.empty(0, dtype=torch.int64, device=DEVICE)
    before = cache.clone()
    scatter(cache, ids, gather(cache, ids))
    assert torch.equal(cache, before)


def test_a_payload_that_does_not_fit_is_refused() -> None:
    cache, ids = normal(2, 2, 3, 1, 4, 8, dtype=torch.float32), torch.tensor([1], device=DEVICE)
    payload = gather(cache, ids)
    with pytest.raises(AssertionError, match="does not fit"):
        scatter(cache, torch.tensor([0, 1], device=DEVICE), payload)
    with pytest.raises(AssertionError, match=r"payload is torch\.float16"):
        scatter(cache, ids, payload.half())
