"""The angles of rotary embeddings, computed once a step for all layers. float32 and in transformers' order of
operations: at position 100,000 one rounding of a frequency is a visible turn.

Legend: T tokens, P rotated pairs of a head (half its dimension).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F

from workers.attention.backend import AttentionInputs, CosSin
from workers.kernels.this_device import to_device
from workers.models.rope_kinds import (
    DynamicRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
)


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> tuple[int, ...]:
    """Where each dimension of a head stands in the checkpoint; () if all stand where they are.

    The kernels turn the pairs (i, i + D / 2) of a head, and pairs by an angle of 0 where fewer turn. A checkpoint has
    the pairs that turn first: (i, i + R / 2) of `rotary_dim` R, or (2 i, 2 i + 1) where they are `interleaved`. Queries
    and keys in another order have the same products.
    """
    half, turned = head_dim // 2, rotary_dim // 2
    firsts = [2 * i if interleaved else i for i in range(turned)]
    seconds = [2 * i + 1 if interleaved else i + turned for i in range(turned)]
    still = list(range(rotary_dim, head_dim))
    order = (*firsts, *still[: half - turned], *seconds, *still[half - turned :])
    return () if order == tuple(range(head_dim)) else order


class Rotations:
    """cos and sin for each layer of a model. Layers of the same rope share them."""

    def __init__(self, ropes: Sequence[Rope | None], head_dim: int, rotary_dim: int, device: str) -> None:
        self._ropes = tuple(ropes)
        self._of_rope = {rope: Rotation(rope, head_dim, device, rotary_dim=rotary_dim) for rope in dict.fromkeys(ropes)}

    def __call__(self, inputs: AttentionInputs, prompt_lens: Sequence[int]) -> tuple[CosSin, ...]:
        made = {rope: rotation(inputs, prompt_lens) for rope, rotation in self._of_rope.items()}
        return tuple(made[rope] for rope in self._ropes)


class Rotation:
    """cos and sin for the tokens of a step. Frequencies are kept per regime; most ropes have one. Without a rope, and
    for the pairs of a head that do not turn, all angles are 0."""

    def __init__(self, rope: Rope | None, head_dim: int, device: str, *, rotary_dim: int | None = None) -> None:
        self._rope = rope or Rope(theta=1.0)
        self._rotary_dim = (head_dim if rotary_dim is None else rotary_dim) if rope else 0
        self._num_still = (head_dim - self._rotary_dim) // 2
        self._device = device
        self._start_P = self._frequencies(0)
        self._varies = isinstance(rope, DynamicRope | LongRope)

    def __call__(self, inputs: AttentionInputs, prompt_lens: Sequence[int]) -> CosSin:
        """Returns (cos, sin), each [T, P]. `prompt_lens` has the full prompt's length of each row of `inputs`."""
        frequencies = self._of_tokens(inputs, prompt_lens) if self._varies else self._start_P
        angles_TP = inputs.positions_T.unsqueeze(1).float() * frequencies
        cos_TP, sin_TP = angles_TP.cos() * self._rope.magnitude, angles_TP.sin() * self._rope.magnitude
        if not self._num_still:
            return cos_TP, sin_TP
        return F.pad(cos_TP, (0, self._num_still), value=1.0), F.pad(sin_TP, (0, self._num_still))

    def _of_tokens(self, inputs: AttentionInputs, prompt_lens: Sequence[int]) -> torch.Tensor:
        """[T, P]: runs of neighbouring tokens share a regime."""
        regimes = [
            self._rope.regime(max(prompt_len, position + 1))
            for row, prompt_len in enumerate(prompt_lens)
            for position in _positions(inputs, row)
        ]
        runs = [(regime, len(list(run))) for regime, run in groupby(regimes)]
        frequencies = {regime: self._frequencies(regime) for regime in set(regimes)}
        return torch.cat([frequencies[regime].expand(count, -1) for regime, count in runs])

    def _frequencies(self, regime: int) -> torch.Tensor:
        return to_device(inverse_frequencies(self._rope, self._rotary_dim, regime).numpy(), self._device)


def _positions(inputs: AttentionInputs, row: int) -> range:
    num_tokens = inputs.query_starts[row + 1] - inputs.query_starts[row]
    return range(inputs.context_lens[row] - num_tokens, inputs.context_lens[row])


def inverse_frequencies(rope: Rope, head_dim: int, regime: int) -> torch.Tensor:
    """[P] float32: the angle by which each pair turns from one position to the next."""
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain_P = 1.0 / (rope.theta**exponents_P)
    match rope:
        case LinearRope():
            return plain_P / rope.factor
        case ProportionalRope():
            still = torch.arange(head_dim // 2) >= int(rope.proportion * head_dim // 2)
            return plain_P.masked_fill(still, 0.0) / rope.factor
        case DynamicRope():
            length = torch.tensor(max(regime, rope.max_position))
            growth = (rope.factor * length / rope.max_position) - (rope.factor - 1)
            return 1.0 / ((rope.theta * growth ** (head_dim / (head_dim - 2))) ** exponents_P)
        case YarnRope():
            return _yarn(rope, head_dim, exponents_P)
        case LongRope():
            factors = rope.long_factors if regime else rope.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents_P)
        case FactorsRope():
            return plain_P / torch.tensor(rope.factors, dtype=torch.float32)
        case Llama3Rope():
            return _llama3(rope, plain_P)
    return plain_P


def _yarn(rope: YarnRope, head_dim: int, exponents_P: torch.Tensor) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_max_position / (times * 2 * math.pi)
        return (head_dim * math.log(wavelength)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_P = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths_P = rope.theta**exponents_P
    kept_P = 1 - ramp_P
    return 1.0 / (rope.factor * wavelengths_P) * (1 - kept_P) + 1.0 / wavelengths_P * kept_P


def _llama3(rope: Llama3Rope, plain_P: torch.Tensor) -> torch.Tensor:
    wavelengths_P = 2 * math.pi / plain_P
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    turns_P = rope.original_max_position / wavelengths_P
    blend_P = (turns_P - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    scaled_P = torch.where(wavelengths_P > shortest_scaled, plain_P / rope.factor, plain_P)
    blended_P = (1 - blend_P) * scaled_P / rope.factor + blend_P * scaled_P
    between_P = ~(wavelengths_P < longest_kept) & ~(wavelengths_P > shortest_scaled)
    return torch.where(between_P, blended_P, scaled_P)
