"""Products with quantised weights: each kernel against float64, its twin, and the canonical form that was packed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from tests.kernels import quantised_twins
from tests.kernels.conftest import DEVICE, ON_GPU, assert_near, normal
from workers.kernels.cpu.quantised import PackedQuantised, can_pack
from workers.kernels.quantised import activations, grouped_codes, one_byte, split_sums
from workers.kernels.quantised.activations import round_inputs
from workers.kernels.quantised.grouped_codes import GroupedCodes, ProductTile, grouped_product
from workers.kernels.quantised.one_byte import byte_product
from workers.kernels.quantised.packed_weights import packed_groups
from workers.kernels.quantised.product_choice import packed_bytes, quantised_product
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.bit_stream import pack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

NARROW = torch.bfloat16 if ON_GPU else torch.float16
"""Codes of 4 bits become bfloat16 by instructions that the interpreter does not have."""

WIDE = ProductTile(outputs=128, rows=128, warps=8, stages=3)


def weight_of(
    *,
    bits: int = 4,
    outputs: int = 70,
    inputs: int = 256,
    group: int = 128,
    zeros: bool = False,
    factors: int = 0,
    minimums: bool = False,
    table: bool = False,
    seed: int = 0,
) -> QuantisedWeight:
    """A random weight. With `factors` a scale is that of a group of groups, times the group's own."""
    generator = torch.Generator().manual_seed(seed)
    codes_OI = torch.randint(2**bits, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = -(-inputs // group)

    def values(part: float) -> GroupValues:
        blocks = groups // factors if factors else groups
        value_OB = (torch.rand(outputs, blocks, generator=generator) * part / (32 if factors else 1)).half()
        factor_OG = torch.randint(1, 64, (outputs, groups), generator=generator).to(torch.uint8)
        return GroupValues(value_OB=value_OB.to(DEVICE), factor_OG=factor_OG.to(DEVICE) if factors else None)

    zero_OG = torch.randint(2**bits, (outputs, groups), generator=generator).to(torch.uint8).to(DEVICE)
    return QuantisedWeight(
        bits=bits,
        codes_OW=pack_bits(codes_OI, bits).to(DEVICE),
        num_inputs=inputs,
        scale=values(0.5 / 2**bits),
        group_size=group,
        zero=0 if table else zero_OG if zeros else 2 ** (bits - 1),
        table=torch.randn(2**bits, generator=generator).to(DEVICE) * 2 ** (bits - 2) if table else None,
        minimum=values(0.2) if minimums else None,
    )


def packed(weight: QuantisedWeight, multiprocessors: int = 1) -> GroupedCodes:
    codes = packed_groups(weight, multiprocessors)
    assert codes is not None
    return codes


def assert_product(ours_TO: torch.Tensor, x_TI: torch.Tensor, weight: QuantisedWeight, *, loose: float = 1) -> None:
    """Near the float64 product with the dequantised weight, by what the sums of magnitudes allow."""
    w_OI, x_TI = weight.dequantised().double(), x_TI.double()
    exact_TO, size_TO = x_TI @ w_OI.T, x_TI.abs() @ w_OI.abs().T
    allowed_TO = (2 * exact_TO.abs() + 0.05 * size_TO) * torch.finfo(ours_TO.dtype).eps * loose
    assert ((ours_TO.double() - exact_TO).abs() <= allowed_TO).all()


FORMS = {
    "4 bits, one zero": weight_of(),
    "4 bits, a zero each": weight_of(zeros=True, group=64),
    "8 bits": weight_of(bits=8, group=32, inputs=128),
    "8 bits, a zero each": weight_of(bits=8, zeros=True),
    "a row is a group": weight_of(inputs=200, group=200),
    "Q4_K": replace(weight_of(group=32, factors=8, minimums=True), zero=0),
    "Q6_K": replace(weight_of(bits=6, group=16, factors=16), zero=32),
    "3 bits": weight_of(bits=3),
    "5 bits": weight_of(bits=5, group=32, minimums=True),
    "2 bits": weight_of(bits=2, group=16),
    "table of 16": weight_of(group=64, table=True),
    "table of 256": weight_of(bits=8, table=True, group=256),
    "ends within a step": weight_of(inputs=80, group=16, zeros=True),
    "ends within a step, in two levels": replace(weight_of(inputs=96, group=16, factors=2, minimums=True), zero=0),
    "begins within a group": weight_of(inputs=384).cut_inputs(32, 192),
    "begins at a group": replace(weight_of(inputs=384), group_offset=0).cut_inputs(128, 256),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_groups(form: str) -> None:
    weight = FORMS[form]
    x_TI = normal(3, weight.num_inputs, dtype=NARROW)
    codes = packed(weight)
    ours_TO = grouped_product(x_TI, codes)
    narrow = weight.table is not None  # whose levels are rounded to the type
    assert_product(ours_TO, x_TI, weight, loose=10 if narrow else 1)
    tolerance = 4 * torch.finfo(NARROW).eps
    torch.testing.assert_close(ours_TO, quantised_twins.grouped_product(x_TI, codes), rtol=tolerance, atol=tolerance)
    twin_OP = quantised_twins.grouped_weight(codes)
    if codes.inputs_P is None:
        twin_OP = twin_OP[:, : weight.num_inputs]
        torch.testing.assert_close(twin_OP, weight.dequantised(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_unit_that_is_read_has_its_numbers(form: str) -> None:
    """Also those after the last input: a missing number may be NaN, and NaN times 0 is NaN."""
    codes = packed(FORMS[form])
    num_units = codes.num_positions // (codes.fields_per_unit * codes.field)
    for numbers in (codes.scale, *([codes.minimum] if codes.minimum else [])):
        assert len(numbers.values_VO) * numbers.units_per_value >= num_units
        if numbers.factors_GO is not None:
            assert len(numbers.factors_GO) * numbers.units_per_factor >= num_units
    if isinstance(codes.zero, torch.Tensor):
        assert len(codes.zero) * codes.units_per_zero >= num_units


@pytest.mark.parametrize("form", ["4 bits, a zero each", "8 bits", "Q4_K", "table of 16"])
def test_in_float32(form: str) -> None:
    weight = FORMS[form]
    x_TI = normal(2, weight.num_inputs, dtype=torch.float32)
    bias_O = normal(weight.num_outputs, dtype=torch.float32, seed=1)
    ours_TO = grouped_product(x_TI, packed(weight), bias_O)
    assert_near(ours_TO, x_TI.double() @ weight.dequantised().double().T + bias_O.double())


@pytest.mark.parametrize("form", ["4 bits, a zero each", "8 bits", "Q6_K"])
@pytest.mark.parametrize("rows", [20, 130])
def test_many_rows(form: str, rows: int) -> None:
    weight = FORMS[form]
    x_TI = normal(rows, weight.num_inputs, dtype=NARROW)
    assert_product(grouped_product(x_TI, packed(weight), tile=WIDE if rows > 64 else None), x_TI, weight)


def test_an_order_of_inputs_permutes_them_once() -> None:
    plain = weight_of(zeros=True, inputs=192, group=64)
    order_I = torch.randperm(192, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    starts = torch.tensor([0, 70, 134, 192], device=DEVICE)
    weight = replace(plain, order_I=order_I, group_starts=starts)
    codes = packed(weight)
    assert codes.num_positions % 128 == 0
    assert codes.inputs_P is not None
    x_TI = normal(2, 192, dtype=NARROW)
    assert_product(grouped_product(x_TI, codes), x_TI, weight)


def test_shares_of_a_sum_are_added_in_one_order() -> None:
    """A row has the same bits alone and among 16, and in the next launch."""
    weight = weight_of(inputs=1024, outputs=64)
    codes = packed(weight, multiprocessors=2)
    x_TI = normal(16, 1024, dtype=NARROW)
    together_TO = grouped_product(x_TI, codes)
    assert_product(together_TO, x_TI, weight)
    assert torch.equal(grouped_product(x_TI[5:6].contiguous(), codes), together_TO[5:6])
    assert torch.equal(grouped_product(x_TI, codes), together_TO)


@pytest.mark.skipif(ON_GPU, reason="there streams are the device's")
def test_a_launch_of_another_stream_has_other_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight in two launches at once, with separate counters."""
    codes, x_TI = packed(weight_of(inputs=1024, outputs=64), multiprocessors=2), normal(3, 1024, dtype=NARROW)
    expected_TO = grouped_product(x_TI, codes)
    streams = iter([7, 8])
    monkeypatch.setattr(split_sums, "_stream_of", lambda device: next(streams))
    under_way = split_sums.arrivals(x_TI.device)
    under_way += 1
    assert torch.equal(grouped_product(x_TI, codes), expected_TO)
    assert under_way.all()


@pytest.mark.parametrize("levels", ["int8", "fp8"])
@pytest.mark.parametrize(("inputs", "group"), [(100, None), (300, 128), (256, 128)])
def test_inputs_are_rounded_as_their_twin_rounds_them(levels: str, inputs: int, group: int | None) -> None:
    x_TI = normal(5, inputs, dtype=torch.float32)
    x_TI[1] = 0
    x_TI[2, ::2] *= 1e-4  # below the first normal number of fp8
    for fp8_type in (torch.float16, torch.float8_e4m3fn):
        form = {"levels": levels, "group": group, "fp8_type": fp8_type}
        ours, twin = round_inputs(x_TI, **form), quantised_twins.round_inputs(x_TI, **form)  # type: ignore[arg-type]
        assert torch.equal(ours.scale_TG, twin.scale_TG)
        assert torch.equal(ours.levels_TI.float(), twin.levels_TI.float())


@pytest.mark.parametrize("levels", ["int8", "fp8"])
def test_a_given_scale_rounds_too(levels: str) -> None:
    x_TI = normal(4, 96, dtype=torch.float32) * 3
    form = {"levels": levels, "scale": torch.tensor([0.02], device=DEVICE), "zero": -7 if levels == "int8" else 0}
    ours, twin = round_inputs(x_TI, **form), quantised_twins.round_inputs(x_TI, **form)  # type: ignore[arg-type]
    assert torch.equal(ours.levels_TI.float(), twin.levels_TI.float())


def bytes_of(levels: str, outputs: int, inputs: int, groups: int, rounding: ActivationRounding) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(3)
    if levels == "int8":
        codes_OI = torch.randint(256, (outputs, inputs), generator=generator).to(torch.uint8)
        table = None
    else:
        codes_OI = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(DEVICE)
    return QuantisedWeight(
        bits=8,
        codes_OW=codes_OI.to(DEVICE),
        num_inputs=inputs,
        scale=GroupValues(value_OB=(torch.rand(outputs, groups, generator=generator) * 0.1).to(DEVICE)),
        group_size=128 if groups > 1 else inputs,
        zero=128 if levels == "int8" else 0,
        table=table,
        activations=rounding,
    )


ROUNDINGS = {
    "int8 by token": ActivationRounding(levels="int8"),
    "int8 given": ActivationRounding(levels="int8", scale=0.03, zero=5),
    "fp8 by token": ActivationRounding(levels="fp8"),
    "fp8 by 128": ActivationRounding(levels="fp8", group=128),
    "fp8 given": ActivationRounding(levels="fp8", scale=0.01),
}


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(("rows", "inputs"), [(3, 300), (20, 256)])
def test_weights_and_inputs_of_one_byte(name: str, rows: int, inputs: int) -> None:
    rounding = ROUNDINGS[name]
    groups = 1 if rounding.levels == "int8" or rounding.scale else -(-inputs // 128)
    weight = bytes_of(rounding.levels, 70, inputs, groups, rounding)
    dtype = torch.float16 if ON_GPU and rounding.levels == "fp8" else torch.float32  # Hopper adds 128 of fp8 in 14 bits
    x_TI, bias_O = normal(rows, inputs, dtype=dtype), normal(70, dtype=dtype, seed=1)
    product = quantised_product(weight)
    assert product is not None
    levels_TI, scale = rounding.rounded(x_TI)
    exact_TO = (levels_TI * scale).double() @ weight.dequantised().double().T + bias_O.double()
    assert_near(product(x_TI, bias_O), exact_TO)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_broken_input_breaks_its_whole_row(name: str, number: float) -> None:
    rounding = ROUNDINGS[name]
    weight = bytes_of(rounding.levels, 64, 256, 1 if rounding.levels == "int8" else 2, rounding)
    codes = packed_bytes(weight, 2, fp8_units=False)
    assert codes is not None
    x_TI = normal(3, 256, dtype=torch.float32)
    x_TI[1, 200] = number
    fixed = None if rounding.scale is None else torch.tensor([rounding.scale], device=DEVICE)
    form = {"levels": rounding.levels, "group": rounding.group, "scale": fixed, "zero": rounding.zero}
    rounders = round_inputs, quantised_twins.round_inputs
    ours, twin = (rounder(x_TI, fp8_type=torch.float16, **form) for rounder in rounders)  # type: ignore[arg-type]
    for rows in (ours, twin):
        assert not rows.levels_TI.isnan().any()
    levels_TI, scale = rounding.rounded(x_TI)
    products = [
        function(twin, codes, dtype=torch.float32, zero=rounding.zero)
        for function in (byte_product, quantised_twins.byte_product)
    ]
    products += [byte_product(ours, codes, dtype=torch.float32, zero=rounding.zero)]
    products += [(levels_TI * scale) @ weight.dequantised().T]
    if not ON_GPU:
        products += [
            PackedQuantised(weight, dtype)(x_TI.to(dtype))
            for dtype in (torch.float32, torch.bfloat16)
            if can_pack(weight, dtype)
        ]
    for product_TO in products:
        assert product_TO.isfinite().all(1).tolist() == [True, False, True]
        assert product_TO[1].isnan().all()


@pytest.mark.parametrize("levels", ["int8", "fp8"])
def test_a_row_of_bytes_does_not_depend_on_its_batch(levels: str) -> None:
    """int8 in any tile, for integers are added; fp8 among up to 16 rows."""
    weight = bytes_of(levels, 64, 1024, 1, ActivationRounding(levels=levels))  # type: ignore[arg-type]
    codes = packed_bytes(weight, 2, fp8_units=False)
    assert codes is not None
    x_TI = normal(16 if levels == "fp8" else 40, 1024, dtype=torch.float32)

    def product(rows_TI: torch.Tensor) -> torch.Tensor:
        rounded = round_inputs(rows_TI, levels=levels, fp8_type=torch.float16)  # type: ignore[arg-type]
        return byte_product(rounded, codes, dtype=torch.float32)

    assert torch.equal(product(x_TI)[5:6], product(x_TI[5:6]))


def test_twin_of_bytes_is_near_float64() -> None:
    weight = bytes_of("fp8", 30, 256, 2, ROUNDINGS["fp8 by 128"])
    codes = packed_bytes(weight, 1, fp8_units=False)
    assert codes is not None
    x_TI = normal(3, 256, dtype=torch.float32)
    rounded = quantised_twins.round_inputs(x_TI, levels="fp8", group=128, fp8_type=torch.float16)
    levels_TI, scale = ROUNDINGS["fp8 by 128"].rounded(x_TI)
    exact_TO = (levels_TI * scale).double() @ weight.dequantised().double().T
    assert_near(quantised_twins.byte_product(rounded, codes, dtype=torch.float32), exact_TO)


def test_weights_without_a_kernel_use_the_reference() -> None:
    outliers = ActivationRounding(levels="int8", outliers_from=6.0)
    assert quantised_product(bytes_of("int8", 8, 128, 1, outliers)) is None
    assert quantised_product(bytes_of("int8", 8, 256, 2, ROUNDINGS["int8 by token"])) is None
    assert quantised_product(replace(bytes_of("fp8", 8, 256, 2, ROUNDINGS["fp8 by 128"]), group_offset=64)) is None
    assert quantised_product(weight_of(inputs=64, group=4)) is None, "most positions would be gaps"


def test_no_rows_are_no_launch_and_other_shapes_are_refused() -> None:
    codes = packed(FORMS["4 bits, one zero"])
    assert grouped_product(torch.empty(0, 256, device=DEVICE), codes).shape == (0, 70)
    with pytest.raises(AssertionError, match="x has 255 inputs"):
        grouped_product(torch.zeros(1, 255, device=DEVICE), codes)
    with pytest.raises(AssertionError, match="strides"):
        grouped_product(torch.zeros(256, 2, device=DEVICE).T, codes)


class Launches:
    """Stands where a kernel is: on torch's meta device there is nothing to compute, and a look at a value raises."""

    def __init__(self) -> None:
        self.number = 0

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def launch(*args: object, **options: object) -> None:
            self.number += 1

        return launch


def on_meta(value: object) -> object:
    """Its tensors without values."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if is_dataclass(value):
        return replace(value, **{field.name: on_meta(getattr(value, field.name)) for field in fields(value)})  # type: ignore[type-var]
    return value


def test_no_launch_reads_values_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So CUDA graphs can be captured, also with an order of inputs and with rounded inputs."""
    launches = Launches()
    for module, name in ((grouped_codes, "_grouped"), (one_byte, "_bytes"), (activations, "_round")):
        monkeypatch.setattr(module, name, launches)
    order_I = torch.randperm(256, device=DEVICE)
    weights = [FORMS["Q4_K"], replace(FORMS["4 bits, a zero each"], order_I=order_I)]
    weights += [
        bytes_of(rounding.levels, 70, 256, 1, rounding) for rounding in ROUNDINGS.values() if rounding.group is None
    ]
    for weight in weights:
        product = quantised_product(weight)
        assert product is not None
        for attribute, value in vars(product).items():
            setattr(product, attribute, on_meta(value))
        for rows in (1, 300):
            out_TO = product(torch.empty(rows, 256, device="meta", dtype=torch.bfloat16))
            assert (out_TO.shape, out_TO.dtype) == ((rows, 70), torch.bfloat16)
    assert launches.number == 2 * (2 + 2 * 4)
