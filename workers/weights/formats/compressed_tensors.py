"""compressed-tensors: `weight_packed` is a dense stream along the inputs, of codes with 2**(bits - 1) added. Packed
zero points are one along the outputs. Weights of one byte are stored as they are.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protos.errors import BadCheckpoint
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.bit_stream import select_columns, unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight, sorted_by_group
from workers.weights.compressed_schemes import ActivationScheme, CompressedLayers, LayerScheme
from workers.weights.encoding import WeightEncoding, WeightEncodings
from workers.weights.formats.byte_weight import ByteSettings, ByteWeight
from workers.weights.formats.float_matrix import FLOAT_ENCODING
from workers.weights.formats.quantised_matrix import StoredWeight, encodings_where
from workers.weights.formats.stored_tensors import StoredTensors, bytes_of_words, covering_words
from workers.weights.source import WeightSource


def encodings(layers: CompressedLayers, source: WeightSource) -> WeightEncodings:
    """The config decides, and not which tensors are there: one-byte weights are called as float weights are."""

    def scheme_of(name: str) -> LayerScheme:
        scheme = layers.of_layer(name)
        assert scheme is not None
        return scheme

    quantised = encodings_where("weight_scale", source, scheme_of, _stored)

    def encoding_of(name: str) -> WeightEncoding:
        return FLOAT_ENCODING if layers.of_layer(name) is None else quantised(name)

    return encoding_of


def _stored(stored: StoredTensors, scheme: LayerScheme) -> StoredWeight:
    if scheme.packed:
        return PackedIntegers(stored, scheme)
    asymmetric = not scheme.symmetric
    return ByteWeight(
        stored,
        ByteSettings(
            levels="int8" if scheme.levels == "int" else "fp8",
            strategy=scheme.strategy,
            scale="weight_scale",
            block=(scheme.block_rows, scheme.group_size),
            zero="weight_zero_point" if asymmetric else None,
            activations=_rounding(scheme.activations),
            input_scale="input_scale" if scheme.activations and scheme.activations.static else None,
            input_zero="input_zero_point" if scheme.activations and not scheme.activations.symmetric else None,
        ),
    )


def _rounding(scheme: ActivationScheme | None) -> ActivationRounding | None:
    return None if scheme is None else ActivationRounding(levels=scheme.levels, group=scheme.group)


class PackedIntegers:
    """Words that hold several outputs or inputs are read whole, and cut when they are converted."""

    def __init__(self, stored: StoredTensors, scheme: LayerScheme) -> None:
        total_outputs, total_inputs, bits = stored.projection.total, stored.share.total_inputs, scheme.bits
        self.stored, self._scheme = stored, scheme
        self._group_size = min(scheme.group_size, total_inputs) if scheme.strategy == "group" else total_inputs
        self._num_groups = -(-total_inputs // self._group_size)
        input_words, skipped = covering_words(stored.inputs, bits)
        self._skipped_inputs = skipped if stored.by_inputs else 0
        cut = (1, input_words) if stored.by_inputs else (0, stored.outputs)
        shape = total_outputs, -(-total_inputs * bits // 32)
        self._packed = stored.words("weight_packed", shape, dim=cut[0], part=cut[1])
        self._is_one = scheme.strategy == "tensor"
        scales = total_outputs, self._num_groups
        self._scale = (
            stored.floats("weight_scale", stored.shape_of_one("weight_scale"))
            if self._is_one
            else stored.floats("weight_scale", scales, part=stored.outputs)
        )
        self._zeros: torch.Tensor | None = None
        if not scheme.symmetric:
            zero_words, self._skipped_zeros = covering_words(stored.outputs, bits)
            zeros = -(-total_outputs * bits // 32), self._num_groups
            self._zeros = stored.words("weight_zero_point", zeros, part=zero_words)
        self._g_idx = stored.group_indices("weight_g_idx", self._num_groups)
        if "weight_shape" in stored:
            stored.tensor("weight_shape", (2,), torch.int64, frozenset({"I32", "I64"}), check=self._check_shape)

    def weights(self) -> Sequence[QuantisedWeight]:
        bits, inputs, outputs = self._scheme.bits, self.stored.inputs, self.stored.outputs
        last = self._skipped_inputs + len(inputs)
        codes = select_columns(bytes_of_words(self._packed), bits, slice(self._skipped_inputs, last), last)
        scale_OG = self._scale
        if self._is_one:
            scale_OG = scale_OG.reshape(1, 1).expand(len(outputs), 1).contiguous()
        zero: int | torch.Tensor = 2 ** (bits - 1)
        if self._zeros is not None:
            last = self._skipped_zeros + len(outputs)
            zeros_GO = unpack_bits(bytes_of_words(self._zeros.T), bits, last)
            zero = zeros_GO[:, self._skipped_zeros :].T.contiguous()
        weight = QuantisedWeight(
            bits=bits,
            codes_OW=codes,
            num_inputs=len(inputs),
            scale=GroupValues(value_OB=scale_OG),
            group_size=self._group_size,
            zero=zero,
        )
        return [sorted_by_group(weight, self._g_idx, inputs.start)]

    def _check_shape(self, where: str, shape: torch.Tensor) -> None:
        wanted = [self.stored.projection.total, self.stored.share.total_inputs]
        if shape.tolist() != wanted:
            raise BadCheckpoint(f"{where} is {shape.tolist()}, config.json makes it {wanted}")
