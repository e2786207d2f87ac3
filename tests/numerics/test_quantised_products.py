"""Compiled products with quantised weights against float64, and against themselves in other company."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.numerics.quantised_weights import (
    E4M3,
    IQ4,
    MXFP4,
    NF4,
    grouped,
    integers,
    of_form,
    per_channel,
    random,
    two_levels,
    with_zeros,
)
from workers.kernels import cpu
from workers.kernels.cpu import products, quantised
from workers.kernels.cpu.native_build import native
from workers.kernels.cpu.quantised import PackedQuantised, can_pack
from workers.kernels.cpu.quantised_terms import PackedTerms
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight, sorted_by_group
from workers.weights.formats.quantised_matrix import product

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler here")

ROWS = (1, 2, 3, 4, 7, 16, 70)
SHAPES = ((40, 96), (33, 320), (17, 1024), (100, 50), (1, 33))
DTYPES = (torch.bfloat16, torch.float32)


FORMS = (
    "channel", "grouped 8 32", "grouped 4 128", "grouped 4 32", "grouped 2 64", "grouped 3 128", "grouped 5 32",
    "grouped 6 64", "grouped 7 32", "grouped 4 120", "zeros 4 128", "zeros 4 32", "zeros 8 128", "zeros 3 64",
    "zeros 2 32", "minimum 4 32", "minimum 5 32", "minimum 2 16", "factors 6 16", "factors 3 16",
    "zeros 4 16", "grouped 8 16",
)  # fmt: skip


def rounded(weight: QuantisedWeight, x_TI: torch.Tensor) -> torch.Tensor:
    """Activations rounded as in the kernels, with a scale for each filled step of columns; float64."""
    group = weight.group_size
    if group >= weight.num_columns:
        group = 32
    piece = 16 if group == 16 else 32
    rounding = ActivationRounding(levels="int8", group=piece)
    parts = []
    for part in torch.split(x_TI, group if group % piece else piece * (group // piece), dim=1):
        levels, scale = rounding.rounded(part)
        parts.append(levels.double() * scale.double())
    return torch.cat(parts, dim=1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    """Within the rounding of the result and of float32's sums; `sizes`: sums of the products' magnitudes."""
    unit = 2**-8 if found.dtype == torch.bfloat16 else 2**-23
    assert ((found.double() - expected).abs() <= unit * expected.abs() + 1e-6 * sizes).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_the_exact_one(form: str, dtype: torch.dtype) -> None:
    """The product of the rounded activations in bfloat16, of the activations themselves in float32."""
    for num_outputs, num_inputs in SHAPES:
        weight = of_form(form, num_outputs, num_inputs)
        assert can_pack(weight, dtype)
        packed = PackedQuantised(weight, dtype)
        weight_OI = weight.dequantised().double()
        bias_O = random(num_outputs, seed=9).to(dtype)
        for num_rows in ROWS:
            x_TI = random(num_rows, num_inputs, seed=8).to(dtype)
            inputs = rounded(weight, x_TI) if dtype == torch.bfloat16 else x_TI.double()
            exact = inputs @ weight_OI.T
            sizes = inputs.abs() @ weight_OI.abs().T + inputs.abs().sum(1, keepdim=True) * weight_OI.abs().max()
            assert_close(PackedQuantised(weight, dtype)(x_TI, bias_O), exact + bias_O.double(), sizes + 1)
            assert_close(packed(x_TI), exact, sizes)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_activations_stays_within_the_stated_bound(form: str) -> None:
    """|y - exact| <= sum over pieces of (largest |x| of the piece / 254) * sum of |w|, and bfloat16's own rounding."""
    for num_outputs, num_inputs in SHAPES:
        weight = of_form(form, num_outputs, num_inputs)
        weight_OI = weight.dequantised().double()
        x_TI = random(5, num_inputs, seed=8).bfloat16()
        actual = PackedQuantised(weight, torch.bfloat16)(x_TI).double()
        exact = x_TI.double() @ weight_OI.T
        piece = 16 if weight.group_size == 16 else 32
        pieces = zip(torch.split(x_TI.double(), piece, 1), torch.split(weight_OI, piece, 1), strict=True)
        bound = sum((x.abs().amax(1, keepdim=True) / 254 * w.abs().sum(1) for x, w in pieces), torch.zeros(()).double())
        if weight.group_size % piece == 0:
            assert ((actual - exact).abs() <= bound * (1 + 1e-5) + 2**-8 * (exact.abs() + bound) + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_depend_on_nothing_else(form: str, dtype: torch.dtype) -> None:
    weight = of_form(form, 200, 1024)
    packed, x_TI = PackedQuantised(weight, dtype), random(70, 1024, seed=8).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = packed(x_TI)
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for rows in (slice(0, 1), slice(3, 5), slice(1, 4), slice(9, 26), slice(0, 70)):
                assert torch.equal(packed(x_TI[rows]), expected[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["channel", "grouped 4 128", "zeros 4 32", "minimum 4 32", "factors 6 16"])
def test_a_gated_product_is_the_gate_of_the_product(form: str, dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((80, 96), (64, 320), (34, 50)):
        weight, bias_O = of_form(form, num_outputs, num_inputs), random(num_outputs, seed=9).to(dtype)
        for num_rows in ROWS:
            x_TI = random(num_rows, num_inputs, seed=8).to(dtype)
            for bias in (None, bias_O):
                actual = PackedQuantised(weight, dtype, gated=True)(x_TI, bias)
                assert torch.equal(actual, cpu.silu_mul(PackedQuantised(weight, dtype)(x_TI, bias)))


def test_padding_adds_outputs_of_zero() -> None:
    weight = with_zeros(4, 128, 21, 256)
    x_TI = random(3, 256).bfloat16()
    actual = PackedQuantised(weight, torch.bfloat16, padding=12)(x_TI)
    assert torch.equal(actual, torch.nn.functional.pad(PackedQuantised(weight, torch.bfloat16)(x_TI), (0, 12)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_may_stand_in_any_order_and_in_cut_groups(dtype: torch.dtype) -> None:
    """act-order, ranges of inputs that begin within a group or block, and groups of any sizes."""
    num_outputs, num_inputs = 40, 512
    group_I = integers(0, 4, num_inputs, seed=5, dtype=torch.int64)
    plain = with_zeros(4, 128, num_outputs, num_inputs)
    ordered = sorted_by_group(plain, group_I, 0)
    assert ordered.order_I is not None
    kquant = two_levels(4, 32, num_outputs, 512, signed=False)
    sixth = two_levels(6, 16, num_outputs, 512, signed=True)
    for weight in (
        ordered, ordered.cut_inputs(128, 200), plain.cut_inputs(32, 300), plain.cut_inputs(16, 128),
        kquant.cut_inputs(64, 256), kquant.cut_inputs(256, 256), sixth.cut_inputs(48, 160),
    ):  # fmt: skip
        assert can_pack(weight, dtype)
        x_TI = random(6, weight.num_inputs, seed=8).to(dtype)
        weight_OI = weight.dequantised().double()
        actual = PackedQuantised(weight, dtype)(x_TI).double()
        exact, sizes = x_TI.double() @ weight_OI.T, x_TI.double().abs() @ weight_OI.abs().T
        worst = 1 / 60 if dtype == torch.bfloat16 else 4e-6
        assert ((actual - exact).abs() <= worst * sizes).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", [NF4, IQ4, MXFP4], ids=["nf4", "iq4", "mxfp4"])
def test_a_code_may_be_a_place_in_a_table(table: torch.Tensor, dtype: torch.dtype) -> None:
    """Integers of 8 bits, once multiplied by a power of two, are summed as such."""
    for num_outputs, num_inputs in SHAPES:
        weight = grouped(4, 32, num_outputs, num_inputs, table=table, zero=0)
        weight_OI = weight.dequantised().double()
        packed = PackedQuantised(weight, dtype)
        for num_rows in ROWS:
            x_TI = random(num_rows, num_inputs, seed=8).to(dtype)
            integer = dtype == torch.bfloat16 and table is not NF4
            inputs = rounded(weight, x_TI) if integer else x_TI.double()
            assert_close(packed(x_TI), inputs @ weight_OI.T, inputs.abs() @ weight_OI.abs().T)


ROUNDINGS = {
    "no rounding": None,
    "each token": ActivationRounding(levels="fp8"),
    "each 128 inputs": ActivationRounding(levels="fp8", group=128),
    "static": ActivationRounding(levels="fp8", scale=0.01),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
def test_fp8_is_multiplied_as_the_checkpoint_says(rounding: ActivationRounding | None, dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in SHAPES:
        for group in (128, num_inputs):
            codes = integers(0, 127, num_outputs, num_inputs) | integers(0, 2, num_outputs, num_inputs, seed=3) << 7
            weight = grouped(
                8, group, num_outputs, num_inputs, table=E4M3, zero=0, codes_OW=codes, activations=rounding
            )
            packed = PackedQuantised(weight, dtype)
            for num_rows in ROWS:
                x_TI = random(num_rows, num_inputs, seed=8).to(dtype)
                sizes = x_TI.double().abs() @ weight.dequantised().double().abs().T
                assert_close(packed(x_TI), product(weight, x_TI).double(), sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rounding",
    [
        ActivationRounding(levels="int8"),
        ActivationRounding(levels="int8", scale=0.02),
        ActivationRounding(levels="int8", scale=0.02, zero=-37),
    ],
    ids=["each token", "static", "static with a zero"],
)
def test_int8_activations_are_rounded_as_the_checkpoint_says(rounding: ActivationRounding, dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in SHAPES:
        weight = per_channel(num_outputs, num_inputs, activations=rounding)
        packed, bias_O = PackedQuantised(weight, dtype), random(num_outputs, seed=9).to(dtype)
        for num_rows in ROWS:
            x_TI = random(num_rows, num_inputs, seed=8).to(dtype)
            sizes = x_TI.double().abs() @ weight.dequantised().double().abs().T + 1
            assert_close(packed(x_TI), product(weight, x_TI).double(), 4 * sizes)
            with_bias = PackedQuantised(weight, dtype)(x_TI, bias_O)
            assert_close(with_bias, product(weight, x_TI).double() + bias_O.double(), 4 * sizes)


@pytest.mark.parametrize("num_inputs", [65_504, 65_536])
def test_the_largest_sum_of_integers_fits(num_inputs: int) -> None:
    """One sum of 32 bits takes so many inputs; more are summed in pieces."""
    rounding = ActivationRounding(levels="int8", scale=1.0)
    codes = torch.full((16, num_inputs), 255, dtype=torch.uint8)
    scale = GroupValues(value_OB=torch.ones(16, 1))
    weight = grouped(8, num_inputs, 16, num_inputs, codes_OW=codes, zero=0, scale=scale, activations=rounding)
    actual = PackedQuantised(weight, torch.float32)(torch.full((9, num_inputs), -128.0))
    assert (actual == -128.0 * 255 * num_inputs).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, "IQ4", "NF4", "E4M3"])
def test_rows_can_be_read_where_they_are_packed(form: str, dtype: torch.dtype) -> None:
    """A head that is tied to an embedding reads such rows, with the same numbers."""
    tables = {"IQ4": IQ4, "NF4": NF4, "E4M3": E4M3.nan_to_num(0.0)}
    for num_outputs, num_inputs in ((33, 320), (17, 50)):
        if form in tables:
            bits = 8 if form == "E4M3" else 4
            weight = grouped(bits, 32, num_outputs, num_inputs, table=tables[form], zero=0)
            if bits == 8:
                weight = replace(weight, codes_OW=weight.codes_OW & 0x7E)
        else:
            weight = of_form(form, num_outputs, num_inputs)
        rows_T = torch.tensor([0, num_outputs - 1, 7, 7, 16])
        actual = PackedQuantised(weight, dtype, padding=3).rows(rows_T)
        assert torch.equal(actual, weight.dequantised()[rows_T].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_outliers_are_multiplied_as_they_are(gated: bool, dtype: torch.dtype) -> None:
    """And a row's bits do not depend on whether another row has any."""
    outliers = ActivationRounding(levels="int8", outliers_from=2.0)
    for num_outputs, num_inputs in ((40, 96), (34, 1024), (100, 50)):
        weight = per_channel(num_outputs, num_inputs, activations=outliers)
        packed = PackedQuantised(weight, dtype, gated=gated)
        x_TI = random(9, num_inputs, seed=8).to(dtype)
        x_TI[3] /= 8  # without
        actual, exact_TO = packed(x_TI), product(weight, x_TI).double()
        if gated:
            torch.testing.assert_close(actual, cpu.silu_mul(exact_TO.to(dtype)), rtol=2e-2, atol=1e-4)
        else:
            assert_close(actual, exact_TO, x_TI.double().abs() @ weight.dequantised().double().abs().T)
        for row in range(9):
            assert torch.equal(packed(x_TI[row : row + 1])[0], actual[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_weights_that_share_the_inputs_are_added_up(dtype: torch.dtype) -> None:
    """Each number of bits of EXL2 has its own inputs, anywhere in the row."""
    num_outputs, num_inputs = 40, 320
    order_I = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))
    weights = [
        replace(grouped(bits, 32, num_outputs, len(part)), num_inputs=num_inputs, order_I=part)
        for bits, part in zip((5, 4, 3), torch.split(order_I, [64, 160, 96]), strict=True)
    ]
    packed, bias_O = PackedTerms(weights, dtype, padding=2), random(42).to(dtype)
    terms = [PackedQuantised(weight, torch.float32) for weight in weights]
    x_TI = random(70, num_inputs, seed=8).to(dtype)
    weight_OI = torch.stack([weight.dequantised().double() for weight in weights]).sum(0)
    sizes = x_TI.double().abs() @ weight_OI.abs().T
    actual, biased = packed(x_TI), packed(x_TI, bias_O)
    assert not actual[:, num_outputs:].any()
    assert torch.equal(biased[:, num_outputs:], bias_O[num_outputs:].expand(70, 2))
    worst = 1 / 60 if dtype == torch.bfloat16 else 4e-6
    exact = x_TI.double() @ weight_OI.T
    assert ((actual[:, :num_outputs].double() - exact).abs() <= worst * sizes).all()
    if dtype == torch.float32:
        first, second, third = (term(x_TI) for term in terms)
        assert torch.equal(actual[:, :num_outputs], first + second + third)
    for num_rows in ROWS:
        assert torch.equal(packed(x_TI[:num_rows]), actual[:num_rows])


def test_unsupported_weights_are_refused() -> None:
    outliers = ActivationRounding(levels="int8", outliers_from=6.0)
    assert not can_pack(grouped(8, 32, 8, 64, activations=outliers), torch.bfloat16)
    assert not can_pack(grouped(5, 16, 8, 64), torch.bfloat16)
    assert not can_pack(grouped(4, 32, 8, 64), torch.float16)
    assert not can_pack(grouped(4, 8, 8, 64), torch.bfloat16)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_nan_is_not_hidden(strange: float) -> None:
    x_TI = random(3, 128).bfloat16()
    x_TI[1, 70] = strange
    actual = PackedQuantised(grouped(4, 128, 20, 128), torch.bfloat16)(x_TI)
    assert actual[1].isnan().all()
    assert actual[[0, 2]].isfinite().all()


@contextmanager
def guarded(*shape: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Zeros, followed by a page that may not be touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    protect = ctypes.CDLL(None).mprotect
    last = ctypes.c_void_p(whole.data_ptr() + size)
    assert protect(last, mmap.PAGESIZE, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
    try:
        yield whole[size - num_bytes : size].view(dtype).view(shape)
    finally:
        protect(last, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_beyond_the_tensors_is_touched(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        opened.append(guarded(*shape, dtype=dtype))
        return opened[-1].__enter__()

    monkeypatch.setattr(quantised, "roomy_zeros", zeros)
    monkeypatch.setattr(products, "empty_rows", lambda rows, width, *, dtype, stride: zeros(rows, width, dtype=dtype))
    weight = of_form(form, 33, 320)
    packed = PackedQuantised(weight, torch.bfloat16)
    expected = PackedQuantised(weight, torch.bfloat16)(random(5, 320).bfloat16())
    x_TI = zeros(5, 320, dtype=torch.bfloat16)
    x_TI.copy_(random(5, 320))
    assert torch.equal(packed(x_TI), expected)
    for each in opened:
        each.__exit__(None, None, None)


@pytest.mark.parametrize("form", ["channel", "grouped 4 128", "grouped 4 32", "minimum 4 32", "factors 6 16"])
def test_packed_weights_take_at_most_a_tenth_more(form: str) -> None:
    weight = of_form(form, 256, 1024)
    assert PackedQuantised(weight, torch.bfloat16).num_bytes <= 1.1 * weight.num_bytes
