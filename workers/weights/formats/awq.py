"""AWQ's version "gemm": `qweight` and `qzeros` are packed along the outputs, eight interleaved codes a word; zeros are
stored as they are. w[k, n] = scales[g, n] * (q[k, n] - z[g, n]).

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.quantization.bit_stream import pack_bits, tiles_of, unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.formats.stored_tensors import StoredTensors, bytes_of_words, covering_words
from workers.weights.source import WeightSource

_BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight outputs' codes in its word


def encodings(group_size: int | None, source: WeightSource) -> WeightEncodings:
    return encodings_where("qweight", source, lambda _: group_size, AWQWeight)


class AWQWeight:
    def __init__(self, stored: StoredTensors, group_size: int | None) -> None:
        share, total_outputs = stored.share, stored.projection.total
        self.stored = stored
        self._group_size = min(group_size or share.total_inputs, share.total_inputs)
        num_groups = -(-share.total_inputs // self._group_size)
        words, self._skipped = covering_words(stored.outputs, _BITS)
        num_words = -(-total_outputs * _BITS // 32)
        cut = (0, stored.inputs) if stored.by_inputs else (1, words)
        self._qweight = stored.words("qweight", (share.total_inputs, num_words), dim=cut[0], part=cut[1])
        self._qzeros = stored.words("qzeros", (num_groups, num_words), dim=1, part=words)
        self._scales = stored.floats("scales", (num_groups, total_outputs), dim=1, part=stored.outputs)

    def weights(self) -> Sequence[QuantisedWeight]:
        num_inputs, num_outputs = len(self.stored.inputs), len(self.stored.outputs)
        tiles = tiles_of(self._qweight.shape[1], 8 * num_inputs)
        codes = torch.cat([pack_bits(_codes(self._qweight[:, words]), _BITS) for words in tiles])
        outputs = slice(self._skipped, self._skipped + num_outputs)
        weight = QuantisedWeight(
            bits=_BITS,
            codes_OW=codes[outputs],
            num_inputs=num_inputs,
            scale=GroupValues(value_OB=self._scales.T.contiguous()),
            group_size=self._group_size,
            zero=_codes(self._qzeros)[outputs].contiguous(),
        )
        return [weight.in_groups_from(self.stored.inputs.start)]


def _codes(words: torch.Tensor) -> torch.Tensor:
    """uint8 [8 W, rows] of int32 [rows, W]."""
    rows, num_words = words.shape
    codes = unpack_bits(bytes_of_words(words), _BITS, 8 * num_words).view(rows, num_words, 8)[:, :, _PLACES]
    return codes.reshape(rows, -1).T
