"""The canonical form of quantised weights: its streams, its values, its cuts and joins, each against plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.bit_stream import pack_bits, packed_bytes, select_columns, unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight, joined, sorted_by_group

BITS = st.integers(2, 8)


def random_codes(num_rows: int, num_values: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (num_rows, num_values), generator=generator).to(torch.uint8)


@given(bits=BITS, num_rows=st.integers(0, 4), num_values=st.integers(0, 70), seed=st.integers(0, 5))
@settings(max_examples=150)
def test_packed_weights_unpack_unchanged(bits: int, num_rows: int, num_values: int, seed: int) -> None:
    values = random_codes(num_rows, num_values, bits, seed)
    stream = pack_bits(values, bits)
    assert stream.shape == (num_rows, packed_bytes(num_values, bits))
    assert torch.equal(unpack_bits(stream, bits, num_values), values)


@given(bits=BITS, num_values=st.integers(1, 40))
@settings(max_examples=60)
def test_value_i_is_at_bit_i_times_bits(bits: int, num_values: int) -> None:
    values = random_codes(1, num_values, bits)
    number = sum(int(value) << (place * bits) for place, value in enumerate(values[0]))
    assert bytes(pack_bits(values, bits)[0].tolist()) == number.to_bytes(packed_bytes(num_values, bits), "little")


@given(bits=BITS, num_values=st.integers(1, 50), data=st.data())
@settings(max_examples=80)
def test_columns_are_selected_wherever_their_bits_are(bits: int, num_values: int, data: st.DataObject) -> None:
    values = random_codes(3, num_values, bits)
    first = data.draw(st.integers(0, num_values))
    last = data.draw(st.integers(first, num_values))
    range_of = select_columns(pack_bits(values, bits), bits, slice(first, last), num_values)
    assert torch.equal(unpack_bits(range_of, bits, last - first), values[:, first:last])
    order = torch.randperm(num_values)
    assert torch.equal(
        select_columns(pack_bits(values, bits), bits, order, num_values), pack_bits(values[:, order], bits)
    )


def make_weight(
    *, outputs: int = 5, inputs: int = 48, bits: int = 4, group: int = 16, form: str = "zeros", seed: int = 0
) -> QuantisedWeight:
    """A random weight in one of the formats' forms."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scale = GroupValues(value_OB=torch.rand(outputs, groups, generator=generator).half())
    weight = QuantisedWeight(
        bits=bits,
        codes_OW=pack_bits(random_codes(outputs, inputs, bits, seed), bits),
        num_inputs=inputs,
        scale=scale,
        group_size=group,
        zero=2 ** (bits - 1),
    )
    if form == "zeros":
        return replace(weight, zero=random_codes(outputs, groups, bits, seed + 1))
    if form == "table":
        return replace(weight, zero=0, table=torch.randn(2**bits, generator=generator))
    if form == "blocks":
        blocks = groups // 3
        factors = torch.randint(0, 64, (outputs, groups), generator=generator).to(torch.uint8)
        value = torch.rand(outputs, blocks, generator=generator).half()
        both = GroupValues(value_OB=value, factor_OG=factors)
        return replace(weight, zero=0, scale=both, minimum=GroupValues(value_OB=value / 3, factor_OG=factors.flip(0)))
    assert form == "ordered"
    group_I = torch.randint(0, groups, (inputs,), generator=generator)
    return sorted_by_group(weight, group_I, 0)


FORMS = ["zeros", "table", "blocks", "ordered"]


def by_hand(weight: QuantisedWeight, o: int, column: int) -> float:
    code = int(unpack_bits(weight.codes_OW, weight.bits, weight.num_columns)[o, column])
    group = int(weight.group_of_column()[column])
    if weight.table is not None:
        level = float(weight.table[code])
    else:
        level = code - int(weight.zero if isinstance(weight.zero, int) else weight.zero[o, group])

    def number(values: GroupValues) -> torch.Tensor:
        value = values.value_OB[o, group // values.groups_per_block].float()
        return value if values.factor_OG is None else value * values.factor_OG[o, group].float()

    product = number(weight.scale) * torch.tensor(level)
    return float(product if weight.minimum is None else product - number(weight.minimum))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_weights_are_scale_times_level_less_minimum(form: str, bits: int) -> None:
    weight = make_weight(form=form, bits=bits)
    whole = weight.dequantised()
    for column in range(weight.num_columns):
        place = column if weight.order_I is None else int(weight.order_I[column])
        for o in range(weight.num_outputs):
            assert float(whole[o, place]) == by_hand(weight, o, column)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("start", "size"), [(0, 48), (0, 16), (16, 32), (7, 30), (47, 1), (33, 15)])
def test_cuts_hold_the_weights_of_their_share(form: str, bits: int, start: int, size: int) -> None:
    weight = make_weight(form=form, bits=bits)
    whole = weight.dequantised()
    cut = weight.cut_inputs(start, size)
    assert torch.equal(cut.dequantised(), whole[:, start : start + size])
    if size > 1:
        again = cut.cut_inputs(1, size - 1)
        assert torch.equal(again.dequantised(), whole[:, start + 1 : start + size])
    assert torch.equal(weight.outputs(slice(1, 4)).dequantised(), whole[1:4])
    assert torch.equal(weight.dequantised(slice(2, 4)), whole[2:4])


def test_a_cut_keeps_only_the_groups_and_blocks_that_it_touches() -> None:
    cut = make_weight(form="zeros").cut_inputs(20, 10)
    assert (cut.scale.num_groups, cut.group_offset) == (1, 4)
    cut = make_weight(form="blocks", inputs=96).cut_inputs(50, 10)
    assert (cut.scale.value_OB.shape[1], cut.scale.num_groups, cut.group_offset) == (1, 3, 2)


@pytest.mark.parametrize("form", FORMS)
def test_alike_weights_are_joined(form: str) -> None:
    first = make_weight(form=form)
    other = replace(first, codes_OW=first.codes_OW.flip(0))
    both = joined([first, other])
    assert both is not None
    assert torch.equal(both.dequantised(), torch.cat([first.dequantised(), other.dequantised()]))


def test_weights_that_differ_in_form_are_not_joined() -> None:
    first = make_weight()
    rounding = ActivationRounding(levels="int8", scale=0.5)
    others = [
        make_weight(bits=3), make_weight(group=8), make_weight(form="ordered"), make_weight(form="table"),
        make_weight(form="blocks"), replace(first, activations=rounding),
        replace(first, scale=GroupValues(value_OB=first.scale.value_OB.float())),
    ]  # fmt: skip
    assert [joined([first, other]) for other in others] == [None] * len(others)
    symmetric = replace(first, zero=7)
    mixed = joined([symmetric, first, replace(first, zero=8)])
    assert mixed is not None
    assert torch.equal(mixed.dequantised()[:5], symmetric.dequantised())


def test_columns_may_be_missing() -> None:
    weight = make_weight(form="ordered")
    part = replace(weight.cut_inputs(3, 20), num_inputs=48)
    assert part.num_columns == 20
    assert torch.equal(part.dequantised()[:, :20], weight.dequantised()[:, 3:23])
    assert not part.dequantised()[:, 20:].any()


def test_bytes_equal_those_of_the_tensors() -> None:
    weight = make_weight(outputs=256, inputs=1024, group=128)
    assert weight.num_bytes == 256 * (512 + 8 * 2 + 8)
