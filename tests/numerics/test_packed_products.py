"""Products with packed weights against float64, and against themselves in batches of other sizes."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from workers.kernels import cpu
from workers.kernels.cpu.native_build import native
from workers.kernels.cpu.products import PackedFloats, can_pack
from workers.kernels.cpu.regions import HUGE_PAGE, Regions, apart, empty_rows, roomy_zeros
from workers.weights.formats.float_matrix import FloatMatrix

needs_compiler = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler: torch multiplies")
DTYPES = [torch.bfloat16, torch.float32]

ROWS = [*range(71), 100, 513]
SIZES = [(40, 96), (64, 320), (96, 1024), (33, 32), (1, 7), (50, 131)]
GATED_SIZES = [(80, 96), (64, 320), (34, 32), (2, 5), (66, 259)]
TOLERANCES = {torch.bfloat16: (2**-8, 1e-3), torch.float32: (1e-5, 1e-4)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_a_product_is_the_exact_one_rounded(
    num_outputs: int, num_inputs: int, with_bias: bool, dtype: torch.dtype
) -> None:
    weight = normal(num_outputs, num_inputs, seed=2, dtype=dtype)
    bias = normal(num_outputs, seed=3, dtype=dtype) if with_bias else None
    packed = PackedFloats(weight)
    rtol, atol = TOLERANCES[dtype]
    for num_rows in ROWS:
        x = normal(num_rows, num_inputs, seed=1, dtype=dtype)
        actual = packed(x, bias)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), GATED_SIZES)
def test_a_gated_product_is_the_gate_of_the_product(
    num_outputs: int, num_inputs: int, with_bias: bool, dtype: torch.dtype
) -> None:
    weight = normal(num_outputs, num_inputs, seed=2, dtype=dtype)
    bias = normal(num_outputs, seed=3, dtype=dtype) if with_bias else None
    plain, gated = PackedFloats(weight), PackedFloats(weight, gated=True)
    for num_rows in ROWS:
        x = normal(num_rows, num_inputs, seed=1, dtype=dtype)
        expected = cpu.silu_mul(plain(x, bias))
        torch.testing.assert_close(gated(x, bias), expected, rtol=1e-2, atol=1e-30)


@needs_compiler
@pytest.mark.parametrize("gate", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 200.0, -200.0, -0.0])
def test_a_gate_beyond_all_bounds_passes_as_it_does_elsewhere(gate: float) -> None:
    """One input of 1: the products are the weights themselves."""
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    weight[0, 0], weight[2, 0] = gate, 2.0
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    actual, expected = PackedFloats(weight, gated=True)(x), cpu.silu_mul(PackedFloats(weight)(x))
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_inputs", [1056, 1031])
def test_a_row_s_product_does_not_depend_on_who_is_in_the_batch(
    num_inputs: int, gated: bool, dtype: torch.dtype
) -> None:
    """Alone, in few rows or in many, with one thread or two: the same bits."""
    x = normal(600, num_inputs, dtype=dtype)
    product = PackedFloats(normal(100, num_inputs, seed=1, dtype=dtype), gated=gated)
    together = product(x)
    for last in range(1, 71):
        assert torch.equal(product(x[:last]), together[:last])
    for first, last in [(3, 35), (100, 163), (100, 165), (17, 598)]:
        assert torch.equal(product(x[first:last]), together[first:last])
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(product(x), together)
    finally:
        torch.set_num_threads(num_threads)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_rows_can_be_read_where_they_are_packed(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight = normal(num_outputs, num_inputs, dtype=dtype)
    rows_T = torch.arange(num_outputs).flip(0)
    assert torch.equal(PackedFloats(weight).rows(rows_T), weight[rows_T])


@needs_compiler
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x = normal(70, 64)
    product = PackedFloats(normal(32, 64, seed=1))
    expected = product(x)
    x[69] = float("nan")
    assert torch.equal(product(x)[:69], expected[:69])
    assert product(x)[69].isnan().all()


@needs_compiler
def test_inputs_may_be_columns_of_a_wider_tensor() -> None:
    wide = normal(20, 192)
    weight = normal(48, 64, seed=1)
    assert torch.equal(PackedFloats(weight)(wide[:, 64:128]), PackedFloats(weight)(wide[:, 64:128].contiguous()))


def test_uncompiled_products_run_on_torch() -> None:
    weight, x = torch.ones(8, 64, dtype=torch.float64), torch.ones(3, 64, dtype=torch.float64)
    assert not can_pack(weight)
    matrix = FloatMatrix(weight)
    matrix.pack()
    assert matrix.packed_weight is None
    assert torch.equal(matrix(x), F.linear(x, weight))


@pytest.mark.parametrize("count", [10, 50_003, HUGE_PAGE // 4 - 1, HUGE_PAGE, 3 * HUGE_PAGE + 2])
def test_roomy_memory_is_zeroed_and_given_out_once(count: int) -> None:
    zeros = roomy_zeros(count, 2, dtype=torch.bfloat16)
    assert zeros.shape == (count, 2)
    assert not zeros.any()
    zeros.fill_(1.0)
    assert not roomy_zeros(count, 2, dtype=torch.bfloat16).any(), "memory is given out once"
    assert zeros.data_ptr() % 16 == 0


def test_roomy_memory_fills_huge_pages() -> None:
    tensors = [roomy_zeros(HUGE_PAGE + 100, dtype=torch.uint8) for _ in range(64)]
    first = [tensor.data_ptr() // HUGE_PAGE for tensor in tensors]
    pages = {page for start in first for page in (start, start + 1)}
    assert len(pages) < 1.1 * len(tensors)


def test_a_steps_memory_is_reused_once_released() -> None:
    num_rows, width = HUGE_PAGE // 512, 1024
    rows = empty_rows(num_rows, width, dtype=torch.int8, stride=apart(width, torch.int8))
    place, part = rows.data_ptr(), rows[5:, 3:]
    assert rows.shape == (num_rows, width)
    assert rows.stride() == (width + 64, 1)
    del rows
    assert empty_rows(num_rows, width, dtype=torch.int8).data_ptr() != place
    del part
    taken = [empty_rows(num_rows // 2, width, dtype=torch.bfloat16) for _ in range(32)]  # others may be free before it
    assert place in [tensor.data_ptr() for tensor in taken]


def test_outgrown_memory_is_released() -> None:
    regions = Regions()
    taken = [regions.take(num_pages * HUGE_PAGE) for num_pages in (1, 2)]
    gone = [weakref.ref(region) for region in taken]
    regions.give_back(taken.pop())
    regions.give_back(taken.pop())
    larger = regions.take(3 * HUGE_PAGE)
    assert [region() is None for region in gone] == [False, True], "one goes for the one that comes"
    regions.give_back(larger)
    assert regions.take(3 * HUGE_PAGE) is larger
