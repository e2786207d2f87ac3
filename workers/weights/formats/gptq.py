"""GPTQ: `qweight` is packed along the inputs, `qzeros` along the outputs, `g_idx` is the group of each input.

w[k, n] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n]), with z = stored + 1 in version 1. The words are a dense
stream of bits in every width. Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protos.errors import UnsupportedModel
from workers.quantization.bit_stream import select_columns, unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight, sorted_by_group
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.formats.stored_tensors import StoredTensors, bytes_of_words, covering_words
from workers.weights.source import WeightSource
from workers.weights.weight_formats import GPTQSizes


def encodings(sizes: GPTQSizes, source: WeightSource) -> WeightEncodings:
    return encodings_where("qweight", source, sizes.of_layer, GPTQWeight)


class GPTQWeight:
    """Words with several outputs or inputs are read whole, and cut during conversion. Scales and zeros of all groups
    are read: with act-order a range of inputs has parts of each group."""

    def __init__(self, stored: StoredTensors, sizes: GPTQSizes) -> None:
        share, total_outputs, bits = stored.share, stored.projection.total, sizes.bits
        self.stored, self._sizes = stored, sizes
        self._group_size = min(sizes.group_size or share.total_inputs, share.total_inputs)
        self._num_groups = -(-share.total_inputs // self._group_size)
        input_words, skipped = covering_words(stored.inputs, bits)
        self._skipped_inputs = skipped if stored.by_inputs else 0
        zero_words, self._skipped_zeros = covering_words(stored.outputs, bits)
        shape = -(-share.total_inputs * bits // 32), total_outputs
        cut = (0, input_words) if stored.by_inputs else (1, stored.outputs)
        self._qweight = stored.words("qweight", shape, dim=cut[0], part=cut[1])
        zeros = self._num_groups, -(-total_outputs * bits // 32)
        self._qzeros = stored.words("qzeros", zeros, dim=1, part=zero_words, check=self._check_zeros)
        self._scales = stored.floats("scales", (self._num_groups, total_outputs), dim=1, part=stored.outputs)
        self._g_idx = stored.group_indices("g_idx", self._num_groups)

    def weights(self) -> Sequence[QuantisedWeight]:
        bits, inputs = self._sizes.bits, self.stored.inputs
        stream = bytes_of_words(self._qweight.T)
        last = self._skipped_inputs + len(inputs)
        codes = select_columns(stream, bits, slice(self._skipped_inputs, last), last)
        weight = QuantisedWeight(
            bits=bits,
            codes_OW=codes,
            num_inputs=len(inputs),
            scale=GroupValues(value_OB=self._scales.T.contiguous()),
            group_size=self._group_size,
            zero=(self._stored_zeros(self._qzeros) + self._sizes.zero_offset).T.contiguous(),
        )
        return [sorted_by_group(weight, self._g_idx, inputs.start)]

    def _stored_zeros(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 [G, O] of the share's outputs."""
        last = self._skipped_zeros + len(self.stored.outputs)
        return unpack_bits(bytes_of_words(words), self._sizes.bits, last)[:, self._skipped_zeros :]

    def _check_zeros(self, where: str, words: torch.Tensor) -> None:
        """Raises for zeros of all ones: version 1 stores a zero of 0 so, and readers disagree about it."""
        bits = self._sizes.bits
        if self._sizes.zero_offset and bool((self._stored_zeros(words) == 2**bits - 1).any()):
            raise UnsupportedModel(
                f"{where} has zero points whose {bits} bits are all ones, 0 or 2**bits: quantise the model again "
                "with checkpoint_format 'gptq_v2'"
            )
