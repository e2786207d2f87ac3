"""Tokens drawn on the device are those that the engine's sampler draws, whatever the filters, ties and seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protos.values import SamplingParams
from tests.kernels.conftest import DEVICE
from workers.batch import Sample
from workers.sampling.sampler import _choose_on_gpu, sample

VOCAB_SIZES = (7, 170)


def logits_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(rows, vocab_size, generator=generator)
    match kind:
        case "peaked":
            return normal * 8
        case "flat":
            return normal * 0.1
        case "tied":
            return (normal * 2).round()  # few values, both zeros among them
        case _:
            banned = torch.rand(rows, vocab_size, generator=generator) < 0.7
            banned[:, 3] = False
            return normal.masked_fill(banned, -torch.inf)


def drawn(logits_RV: torch.Tensor, samples: list[Sample]) -> list[int]:
    """By the way that the sampler takes on a GPU."""
    ids: list[int] = _choose_on_gpu(logits_RV.to(DEVICE), samples).tolist()
    return ids


def samples_of(params: list[SamplingParams]) -> list[Sample]:
    """Indices on both sides of 32 bits."""
    return [Sample(params=param, index=index * (2**32 + 1)) for index, param in enumerate(params)]


FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "none": {},
    "cold": {"temperature": 0.05},
    "top-k 1": {"top_k": 1},
    "top-k": {"top_k": 5},
    "top-k, hot": {"top_k": 40, "temperature": 3.0},
    "top-p": {"top_p": 0.9},
    "top-p, tiny": {"top_p": 1e-6},
    "top-p, nearly all": {"top_p": 0.9999},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 30, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in pieces, as a vocabulary of 128,000 is."""
    monkeypatch.setattr("workers.kernels.draw._BLOCK", 128)


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "banned"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_the_samplers(kind: str, vocab_size: int) -> None:
    """One row for each filter: parameters of neighbours do not mix."""
    settings = [{"temperature": 1.0} | filters for filters in FILTERS.values()]
    params = [SamplingParams(seed=index * 2**40 - 5, **setting) for index, setting in enumerate(settings)]
    logits_RV = logits_of(kind, len(params), vocab_size)
    expected = [output.token_ids[0] for output in sample(logits_RV, samples_of(params)).fetch()]
    assert drawn(logits_RV, samples_of(params)) == expected


ONES = torch.ones(8)
NEIGHBOURS = (ONES.view(torch.int32) + torch.arange(8, dtype=torch.int32)).view(
    torch.float32
)  # with nothing between them


@pytest.mark.parametrize(
    ("logits_V", "filters", "kept"),
    [
        (ONES, {"top_k": 3}, {0, 1, 2}),
        (ONES, {"top_p": 0.5}, {0, 1, 2, 3}),
        (ONES, {"top_k": 6, "top_p": 0.5}, {0, 1, 2}),
        (ONES * torch.tensor([0.0, -0.0] * 4).neg(), {"top_k": 3}, {0, 1, 2}),
        (NEIGHBOURS, {"top_k": 3}, {5, 6, 7}),
        (NEIGHBOURS, {"top_p": 0.5}, {4, 5, 6, 7}),
    ],
    ids=["ties", "ties, top-p", "ties, both", "zeros of both signs", "neighbours", "neighbours, top-p"],
)
def test_every_kept_token_is_drawn_and_no_other(
    logits_V: torch.Tensor, filters: dict[str, Any], kept: set[int]
) -> None:
    """The lowest ids are kept of equal tokens."""
    samples = samples_of([SamplingParams(temperature=1.0, seed=1, **filters)] * 16)
    logits_RV = logits_V.expand(16, 8).contiguous()
    assert {output.token_ids[0] for output in sample(logits_RV, samples).fetch()} == kept
    assert set(drawn(logits_RV, samples)) == kept


def test_a_strided_view_is_read_where_it_lies() -> None:
    """Logits of a vocabulary padded for its ranks are such a view."""
    wide = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    params = [SamplingParams(temperature=0.0)] * 3
    assert drawn(wide[:, :90], samples_of(params)) == wide[:, :90].argmax(dim=1).tolist()


def test_no_rows_are_no_launch() -> None:
    assert drawn(torch.empty(0, 10), []) == []
