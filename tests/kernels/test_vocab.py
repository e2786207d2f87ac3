"""The kernels at both ends of a model: each rank's part of the embedding, and all ranks' parts of the logits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import DEVICE, normal
from workers.kernels import twins
from workers.kernels.vocab import embed, join


@pytest.mark.parametrize("size", [1, 100, 1024, 2500])
def test_each_rank_looks_up_its_ids_and_adds_zeros_for_others(dtype: torch.dtype, size: int) -> None:
    table_VE = normal(30, size, dtype=dtype)
    ids_T = torch.tensor([0, 29, 10, 9, 20, 19, 0], device=DEVICE)
    parts = [embed(ids_T, table_VE[start : start + 10], start) for start in (0, 10, 20)]
    assert torch.equal(torch.stack(parts).sum(dim=0), table_VE[ids_T])
    for start, part in zip((0, 10, 20), parts, strict=True):
        assert torch.equal(part, twins.embed(ids_T, table_VE[start : start + 10], start))


@pytest.mark.parametrize(
    ("ranks", "share", "vocab_size"), [(1, 50, 50), (2, 50, 99), (3, 700, 2100), (8, 3, 17)], ids=str
)
def test_shares_stand_side_by_side_without_their_padding(
    dtype: torch.dtype, ranks: int, share: int, vocab_size: int
) -> None:
    parts_PRS = normal(ranks, 5, share, dtype=dtype)
    joined_RV = join(parts_PRS, vocab_size)
    assert joined_RV.dtype == torch.float32
    expected_RV = torch.cat(list(parts_PRS.double()), dim=1)[:, :vocab_size]
    assert torch.equal(joined_RV.double(), expected_RV)
    assert torch.equal(joined_RV, twins.join(parts_PRS, vocab_size))


def test_no_rows_are_no_launch() -> None:
    assert embed(torch.empty(0, dtype=torch.int64, device=DEVICE), torch.ones(4, 8, device=DEVICE), 0).shape == (0, 8)
    assert join(torch.empty(2, 0, 5, device=DEVICE), 9).shape == (0, 9)


def test_a_layout_they_cannot_read_is_refused() -> None:
    ids_T, table_SE = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.ones(8, 8, device=DEVICE)
    with pytest.raises(AssertionError, match="token ids are"):
        embed(ids_T.int(), table_SE, 0)
    with pytest.raises(AssertionError, match="the table has strides"):
        embed(ids_T, table_SE.mT, 0)
    with pytest.raises(AssertionError, match="logits have strides"):
        join(table_SE.view(2, 4, 8).transpose(1, 2), 8)
    with pytest.raises(AssertionError, match="for a vocabulary of 17"):
        join(table_SE.view(2, 4, 8), 17)
