"""Products on the processor's tiles (AMX) against float64, and against themselves in other company."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from workers.checkpoint.encodings.floats import FloatMatrix, GatedFloatMatrix
from workers.kernels import cpu
from workers.kernels.cpu.build import native_tiles
from workers.kernels.cpu.memory import HUGE_PAGE, Regions, apart, empty_rows, roomy_zeros
from workers.kernels.cpu.products import TiledWeight, can_tile

needs_tiles = pytest.mark.skipif(native_tiles() is None, reason="no AMX here: oneDNN multiplies")

ROWS = [0, 1, 15, 16, 17, 32, 33, 64, 65, 100, 513]
SIZES = [(40, 96), (64, 320), (96, 1024), (33, 32)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_tiles
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_the_exact_one_rounded(num_rows: int, with_bias: bool) -> None:
    for num_outputs, num_inputs in SIZES:
        x, weight = normal(num_rows, num_inputs, seed=1), normal(num_outputs, num_inputs, seed=2)
        bias = normal(num_outputs, seed=3) if with_bias else None
        found = TiledWeight(weight)(x, bias)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)


@needs_tiles
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_product_is_the_gate_of_the_product(num_rows: int, with_bias: bool) -> None:
    for num_outputs, num_inputs in [(80, 96), (64, 320), (34, 32)]:
        x, weight = normal(num_rows, num_inputs, seed=1), normal(num_outputs, num_inputs, seed=2)
        bias = normal(num_outputs, seed=3) if with_bias else None
        found = TiledWeight(weight, gated=True)(x, bias)
        expected = cpu.silu_mul(TiledWeight(weight)(x, bias))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-30)


@needs_tiles
@pytest.mark.parametrize("gate", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 200.0, -200.0, -0.0])
def test_a_gate_beyond_all_bounds_passes_as_it_does_elsewhere(gate: float) -> None:
    """One input of 1: the products are the weights themselves."""
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    weight[0, 0], weight[2, 0] = gate, 2.0
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    found, expected = TiledWeight(weight, gated=True)(x), cpu.silu_mul(TiledWeight(weight)(x))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@needs_tiles
def test_a_row_s_product_does_not_depend_on_who_is_in_the_batch() -> None:
    """Alone, in few rows or in many: the same bits. So a request's tokens are the same whatever else is served."""
    x = normal(600, 1056)
    product = TiledWeight(normal(100, 1056, seed=1))
    together = product(x)
    for first, last in [(0, 1), (3, 35), (100, 163), (100, 165), (17, 598)]:
        assert torch.equal(product(x[first:last]), together[first:last])


@needs_tiles
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x = normal(70, 64)
    product = TiledWeight(normal(32, 64, seed=1))
    expected = product(x)
    x[69] = float("nan")
    assert torch.equal(product(x)[:69], expected[:69])
    assert product(x)[69].isnan().all()


@needs_tiles
def test_inputs_may_be_columns_of_a_wider_tensor() -> None:
    wide = normal(20, 192)
    weight = normal(48, 64, seed=1)
    assert torch.equal(TiledWeight(weight)(wide[:, 64:128]), TiledWeight(weight)(wide[:, 64:128].contiguous()))


def test_what_tiles_do_not_take_is_multiplied_otherwise() -> None:
    assert not can_tile(normal(8, 40))
    assert not can_tile(torch.ones(8, 64))
    for weight in (normal(8, 40), torch.ones(8, 64)):
        x = torch.ones(3, weight.shape[1], dtype=weight.dtype)
        matrix, gated = FloatMatrix(weight), GatedFloatMatrix(weight, cpu)
        expected = F.linear(x, weight)
        matrix.pack()
        gated.pack()
        torch.testing.assert_close(matrix(x), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(gated(x), cpu.silu_mul(expected), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("count", [10, HUGE_PAGE, 3 * HUGE_PAGE + 2])
def test_roomy_memory_is_zeroed_and_starts_where_its_first_page_does(count: int) -> None:
    zeros = roomy_zeros(count, 2, dtype=torch.bfloat16)
    assert zeros.shape == (count, 2)
    assert not zeros.any()
    zeros.fill_(1.0)
    assert zeros.data_ptr() % (HUGE_PAGE if zeros.nbytes >= HUGE_PAGE else 16) == 0


def test_memory_of_a_step_is_given_to_the_next_once_nobody_holds_a_part_of_it() -> None:
    num_rows, width = HUGE_PAGE // 512, 1024
    rows = empty_rows(num_rows, width, dtype=torch.int8, stride=apart(width, torch.int8))
    place, part = rows.data_ptr(), rows[5:, 3:]
    assert rows.shape == (num_rows, width)
    assert rows.stride() == (width + 64, 1)
    del rows
    assert empty_rows(num_rows, width, dtype=torch.int8).data_ptr() != place
    del part
    places = [empty_rows(num_rows // 2, width, dtype=torch.bfloat16) for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in places]


def test_memory_that_grew_too_small_is_not_kept_beside_the_larger() -> None:
    regions = Regions()
    taken = [regions.take(num_pages * HUGE_PAGE) for num_pages in (1, 2)]
    gone = [weakref.ref(region) for region in taken]
    regions.give_back(taken.pop())
    regions.give_back(taken.pop())
    larger = regions.take(3 * HUGE_PAGE)
    assert [region() is None for region in gone] == [False, True], "one goes for the one that comes"
    regions.give_back(larger)
    assert regions.take(3 * HUGE_PAGE) is larger
