"""Packed weights give the products of plain ones, for every number of rows, and take the place of the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model
from workers.weights.formats.float_matrix import FloatMatrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((num_rows, 96), (40, 96), (40,))
    )
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    matrix = FloatMatrix(weight)
    with torch.inference_mode():
        matrix.pack()
        actual = matrix(x, bias if with_bias else None)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_gives_the_plain_one_s_logits(tmp_path: Path, dtype: str, tied: bool) -> None:
    make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    plain, packed = (load_model(tmp_path, dtype=dtype) for _ in range(2))
    packed.pack()
    rows = [("long", list(range(5, 45)), 40), ("short", [7], 1)]
    tolerance = 0.1 if dtype == "bfloat16" else 1e-4
    for expected, actual in zip(PagedRun(plain).step(rows), PagedRun(packed).step(rows), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_packed_weights_are_held_once() -> None:
    weight = torch.ones(64, 64)
    matrix = FloatMatrix(weight)
    matrix.pack()
    assert matrix.packed
    with pytest.raises(AssertionError, match="cannot be read back"):
        _ = matrix.weight_OI
