"""EXL2: inputs are sorted, and each group of them has bits of its own. `q_weight` holds group after group, packed down
the rows; `q_groups` has (bits, first packed row) of each group, `q_scale` s - 1 and `q_scale_max` the group's factor.

w[k, n] = (q - 2**(b - 1)) * s**2 / 256 * q_scale_max[g], and packed row k is input argsort(q_invperm)[k].
Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from protos.errors import BadCheckpoint
from workers.quantization.bit_stream import unpack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.formats.stored_tensors import WORDS, StoredTensors, bytes_of_words, covering_words
from workers.weights.source import WeightSource

_BITS = (2, 3, 4, 5, 6, 8)
_SCALE_BITS = 4
_HALF = frozenset({"F16"})


def encodings(_: None, source: WeightSource) -> WeightEncodings:
    return encodings_where("q_weight", source, lambda _: None, lambda stored, _: EXL2Weight(stored))


class EXL2Weight:
    """A share by inputs has some of each group: all rows are read, and cut when they are converted."""

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored
        inputs, outputs = stored.share.total_inputs, stored.projection.total
        padded = -(-outputs // 32) * 32
        rows = min(inputs, *(stored.shape("q_weight") or (1,))[:1])
        self._num_groups = min(inputs, *(stored.shape("q_scale") or (1,))[:1])
        self._q_weight = stored.words("q_weight", (rows, padded), dim=1, part=stored.outputs)
        words, self._skipped = covering_words(stored.outputs, _SCALE_BITS)
        self._q_scale = stored.words("q_scale", (self._num_groups, padded * _SCALE_BITS // 32), dim=1, part=words)
        self._scale_max = stored.tensor("q_scale_max", (self._num_groups,), torch.float16, _HALF)
        self._groups = stored.tensor(
            "q_groups", (2 * self._num_groups,), torch.int16, frozenset({"I16"}), check=self._check_groups
        )
        self._is_inverse = "q_perm" not in stored or "q_invperm" in stored
        name = "q_invperm" if self._is_inverse else "q_perm"
        self._perm = stored.tensor(name, (inputs,), torch.int32, WORDS | {"I16"}, check=_check_permutation)

    def weights(self) -> Sequence[QuantisedWeight]:
        outputs, total_inputs = self.stored.outputs, self.stored.share.total_inputs
        order = torch.argsort(self._perm) if self._is_inverse else self._perm.long()
        last = self._skipped + len(outputs)
        scales_GO = unpack_bits(bytes_of_words(self._q_scale), _SCALE_BITS, last)[:, self._skipped :].float() + 1
        scale_OG = (scales_GO**2 / 256 * self._scale_max.float()[:, None]).T.contiguous()
        made, first = [], 0
        for bits, run in groupby(enumerate(self._sizes(self._groups)), key=lambda one: one[1][0]):
            members = list(run)
            groups = slice(members[0][0], members[-1][0] + 1)
            rows = slice(members[0][1][1], members[-1][1][2])
            sizes = torch.tensor([(end - start) * 32 // bits for _, (_, start, end) in members])
            num_inputs = int(sizes.sum())
            weight = QuantisedWeight(
                bits=bits,
                codes_OW=bytes_of_words(self._q_weight[rows].T),
                num_inputs=total_inputs,
                scale=GroupValues(value_OB=scale_OG[:, groups].contiguous()),
                group_size=int(sizes[0]),
                zero=2 ** (bits - 1),
                order_I=order[first : first + num_inputs],
            )
            if bool((sizes[:-1] != sizes[0]).any()) or sizes[-1] > sizes[0]:
                starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(order.device)
                weight = replace(weight, group_starts=starts)
            first += num_inputs
            if self.stored.by_inputs:
                weight = weight.cut_inputs(self.stored.inputs.start, len(self.stored.inputs))
            made.append(weight)
        return made

    def _sizes(self, groups: torch.Tensor) -> list[tuple[int, int, int]]:
        """Returns (bits, first row, last row) of each group. Row numbers have 16 bits and wrap."""
        numbers = [number & 0xFFFF for number in groups.tolist()]
        bits, starts = numbers[::2], numbers[1::2]
        ends = [*starts[1:], self._q_weight.shape[0]]
        return list(zip(bits, starts, ends, strict=True))

    def _check_groups(self, where: str, groups: torch.Tensor) -> None:
        sizes = self._sizes(groups)
        fine = all(bits in _BITS and start < end and (end - start) * 32 % bits == 0 for bits, start, end in sizes)
        inputs = sum((end - start) * 32 // bits for bits, start, end in sizes) if fine else 0
        if not fine or sizes[0][1] or inputs != self.stored.share.total_inputs:
            raise BadCheckpoint(
                f"{where} must make up {self.stored.share.total_inputs} inputs of {', '.join(map(str, _BITS))} bits"
            )


def _check_permutation(where: str, perm: torch.Tensor) -> None:
    if not torch.equal(torch.sort(perm).values, torch.arange(len(perm), dtype=perm.dtype, device=perm.device)):
        raise BadCheckpoint(f"{where} is no permutation of {len(perm)} inputs: the file is damaged")
