"""The kernels that go over rows: RMS norm, with and without the residual stream, and gates."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from workers.kernels import twins
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.silu_mul import gelu_tanh_mul, silu_mul

EPS = 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 100), (3, 2048), (2, 5120), (40, 16)])
def test_norm_of_rows(dtype: torch.dtype, rows: int, size: int) -> None:
    x_RE, weight_E = normal(rows, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    assert_near(rms_norm(x_RE, weight_E, EPS), normed(x_RE, weight_E))


@pytest.mark.parametrize(("heads", "dim"), [(5, 64), (1, 128), (8, 80)])
def test_norm_of_heads_inside_a_wider_row(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Queries and keys are normed where the projection left them."""
    wide = normal(7, 3 * heads * dim, dtype=dtype)
    x_TND = wide[:, heads * dim : 2 * heads * dim].view(7, heads, dim)
    weight_D = normal(dim, dtype=dtype, seed=1)
    ours = rms_norm(x_TND, weight_D, EPS)
    assert ours.is_contiguous()
    assert_near(ours, normed(x_TND, weight_D))


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 100), (3, 4096)])
def test_norm_of_a_sum(dtype: torch.dtype, rows: int, size: int) -> None:
    x_RE, residual_RE = normal(rows, size, dtype=dtype), normal(rows, size, dtype=dtype, seed=1)
    weight_E = normal(size, dtype=dtype, seed=2)
    ours, stream_RE = add_rms_norm(x_RE, residual_RE, weight_E, EPS)
    assert torch.equal(stream_RE, x_RE + residual_RE)
    assert_near(ours, normed(stream_RE, weight_E))


def test_norms_round_as_their_twin_does(dtype: torch.dtype) -> None:
    x_RE, weight_E = normal(9, 96, dtype=dtype), normal(96, dtype=dtype, seed=1)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(
        rms_norm(x_RE, weight_E, EPS), twins.rms_norm(x_RE, weight_E, EPS), rtol=2 * ulp, atol=ulp
    )


@pytest.mark.parametrize("size", [1, 100, 1024, 3000])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = normal(3, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("size", [1, 1500])
def test_gelu_tanh_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = normal(3, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(gelu_tanh_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_a_weight_in_float32_is_multiplied_before_rounding() -> None:
    """Gemma's weight is one and a stored number: the sum does not fit into 16 bits."""
    x_RE = normal(9, 96, dtype=torch.float16)
    weight_E = 1 + normal(96, dtype=torch.float16, seed=1).float() / 64
    for ours, x in ((rms_norm(x_RE, weight_E, EPS), x_RE), (add_rms_norm(x_RE, x_RE, weight_E, EPS)[0], 2 * x_RE)):
        torch.testing.assert_close(ours.float(), normed(x, weight_E).float(), rtol=2**-10, atol=0)


def test_no_rows_are_no_launch() -> None:
    empty, weight_E = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert rms_norm(empty, weight_E, EPS).shape == (0, 64)
    assert [part.shape for part in add_rms_norm(empty, empty, weight_E, EPS)] == [(0, 64), (0, 64)]
    assert silu_mul(empty).shape == (0, 32)


def test_a_layout_they_cannot_read_is_refused() -> None:
    x_RE, weight_E = normal(4, 8, dtype=torch.float32), torch.ones(4, device=DEVICE)
    with pytest.raises(AssertionError, match="x has strides"):
        rms_norm(x_RE.mT, weight_E, EPS)
    with pytest.raises(AssertionError, match="residual has strides"):
        add_rms_norm(x_RE[:, :4], x_RE[:, 4:], weight_E, EPS)
    with pytest.raises(AssertionError, match="strides"):
        silu_mul(x_RE[:, :4])
