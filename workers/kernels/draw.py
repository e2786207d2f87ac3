"""Chooses each row's token in Triton: argmax, or temperature, min-p, top-k, top-p and a draw. The host never waits.

It has the same steps, ties and random numbers as `workers.sampling.sampler`, in float64. So a row gets the same token
on any device, unless its random number is within rounding of the border between two tokens.

Nothing is sorted. A filter keeps the tokens above a threshold and some of those on it, and the threshold is found by
bisection over the float32 logits' bits, each step a pass over a row that L2 holds. Bounds move to the next existing
logits, and the search ends when one logit is left between them: some 15 passes for 128,000 logits. Legend: R rows, V
vocabulary, L logits of one pass's block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from workers.kernels.this_device import to_device

# One program a row: 16 warps, to hide L2's latency behind arithmetic in float64, with 4 logits a thread: 16 bytes, and
# few enough registers (114, compiled for 9.0) that nothing spills. Chosen by reasoning, not measured yet.
_BLOCK = 2048
_NUM_WARPS = 16

_OF_ROWS = ["temperature_ptr", "floor_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr", "index_ptr"]
"""Rows of two arrays: where each begins depends on the number of rows."""

_LOWEST = tl.constexpr(-(2**31))  # below every key
_HIGHEST = tl.constexpr(2**31 - 1)  # above every key


@triton.jit
def _keys(logits_L):
    """Integers in the order of the logits. -0 and 0 are equal."""
    bits_L = tl.where(logits_L == 0.0, 0.0, logits_L).to(tl.int32, bitcast=True)
    return bits_L ^ ((bits_L >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logits_L, largest, temperature, floor):
    """Probabilities times a factor of the row; 0 below min-p's `floor`."""
    scaled_L = (logits_L.to(tl.float64) - largest) / temperature
    return tl.where(scaled_L >= floor, tl.exp(scaled_L), 0.0)


@triton.jit
def _best(row_ptr, V, BLOCK: tl.constexpr):
    largest_L = tl.full([BLOCK], float("-inf"), tl.float32)
    ids_L = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        offsets_L = start + tl.arange(0, BLOCK)
        logits_L = tl.load(row_ptr + offsets_L, mask=offsets_L < V, other=float("-inf"))
        ids_L = tl.where(logits_L > largest_L, offsets_L, ids_L)
        largest_L = tl.maximum(largest_L, logits_L)
    largest = tl.max(largest_L, axis=0)
    return largest, tl.min(tl.where(largest_L == largest, ids_L, V), axis=0)


@triton.jit
def _above(row_ptr, V, key, largest, temperature, floor, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (number, weight) of the tokens above a key, the number of tokens at the key, and the nearest keys at or
    below it and above it."""
    number_L = tl.zeros([BLOCK], tl.int32)
    equal_L = tl.zeros([BLOCK], tl.int32)
    weight_L = tl.zeros([BLOCK], tl.float64)
    under_L = tl.full([BLOCK], _LOWEST, tl.int32)
    over_L = tl.full([BLOCK], _HIGHEST, tl.int32)
    for start in range(0, V, BLOCK):
        offsets_L = start + tl.arange(0, BLOCK)
        logits_L = tl.load(row_ptr + offsets_L, mask=offsets_L < V, other=float("-inf"))
        keys_L = _keys(logits_L)
        above_L = (keys_L > key) & (offsets_L < V)
        number_L += above_L.to(tl.int32)
        equal_L += ((keys_L == key) & (offsets_L < V)).to(tl.int32)
        under_L = tl.maximum(under_L, tl.where(keys_L > key, _LOWEST, keys_L))
        over_L = tl.minimum(over_L, tl.where(above_L, keys_L, _HIGHEST))
        if WEIGHED:
            weight_L += tl.where(above_L, _weights(logits_L, largest, temperature, floor), 0.0)
    number, equal = tl.sum(number_L, axis=0).to(tl.int64), tl.sum(equal_L, axis=0)
    return number, tl.sum(weight_L, axis=0), equal, tl.max(under_L, axis=0), tl.min(over_L, axis=0)


@triton.jit
def _search(row_ptr, V, goal, low, number_low, largest, temperature, floor, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key with less than `goal` tokens, or weight, above it. Above `low` there are `number_low` tokens, at
    least `goal`."""
    high = _keys(largest)
    number_high = number_low * 0
    while (high > low + 1) & (number_low - number_high > 1):
        middle = ((low.to(tl.int64) + high) // 2).to(tl.int32)
        number, weight, _equal, under, over = _above(row_ptr, V, middle, largest, temperature, floor, WEIGHED, BLOCK)
        less = (weight < goal) if WEIGHED else (number < goal)
        high, number_high = tl.where(less, under, high), tl.where(less, number, number_high)
        low, number_low = tl.where(less, low, over - 1), tl.where(less, number_low, number)
    return high


@triton.jit
def _uniform(seed, index):
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) / 9007199254740992.0


@triton.jit
def _pick(row_ptr, V, target, key, quota, largest, temperature, floor, BLOCK: tl.constexpr):
    """The first token in vocabulary order at which the kept weights add up to more than `target`: those above the key,
    and the first `quota` on it. If `target` rounds up to all weights, the last token with a weight."""
    total, equal = target * 0.0, quota * 0
    passed, last = 0, 0
    for start in range(0, V, BLOCK):
        offsets_L = start + tl.arange(0, BLOCK)
        inside_L = offsets_L < V
        logits_L = tl.load(row_ptr + offsets_L, mask=inside_L, other=float("-inf"))
        keys_L = _keys(logits_L)
        equal_L = (keys_L == key) & inside_L
        rank_L = equal + tl.cumsum(equal_L.to(tl.int64), axis=0)
        kept_L = (keys_L > key) | (equal_L & (rank_L <= quota))
        weights_L = tl.where(kept_L & inside_L, _weights(logits_L, largest, temperature, floor), 0.0)
        sums_L = total + tl.cumsum(weights_L, axis=0)
        passed += tl.sum(((sums_L <= target) & inside_L).to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weights_L > 0.0, offsets_L, 0), axis=0))
        total = tl.maximum(total, tl.max(sums_L, axis=0))
        equal += tl.sum(equal_L.to(tl.int64), axis=0)
    return tl.minimum(passed, last)


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _draw(
    logits_ptr, ids_ptr, temperature_ptr, floor_ptr, top_k_ptr, top_p_ptr, seed_ptr, index_ptr, V, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    largest, best = _best(row_ptr, V, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        tl.store(ids_ptr + row, best.to(tl.int64))
        return
    floor, top_k, top_p = tl.load(floor_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    key = tl.full([], _LOWEST, tl.int32)
    everything = key.to(tl.int64) * 0 + V
    if top_k < V:
        key = _search(row_ptr, V, top_k, key, everything, largest, temperature, floor, False, BLOCK)
    number, weight, equal, _under, _over = _above(row_ptr, V, key, largest, temperature, floor, True, BLOCK)
    on_key = _weights(_logit(key), largest, temperature, floor)
    quota = tl.minimum(equal, top_k - number).to(tl.int64)
    total = weight + quota.to(tl.float64) * tl.where(quota > 0, on_key, 0.0)
    if top_p < 1.0:
        goal = top_p * total
        if weight >= goal:
            key = _search(row_ptr, V, goal, key, number, largest, temperature, floor, True, BLOCK)
            _number, weight, equal, _under, _over = _above(row_ptr, V, key, largest, temperature, floor, True, BLOCK)
            on_key = _weights(_logit(key), largest, temperature, floor)
            quota = equal.to(tl.int64)
        # the tokens on the key that are needed to reach the goal
        needed = tl.ceil((goal - weight) / tl.where(on_key > 0.0, on_key, 1.0))
        quota = tl.minimum(quota, tl.maximum(needed, 1.0).to(tl.int64))
        total = weight + quota.to(tl.float64) * tl.where(quota > 0, on_key, 0.0)
    target = _uniform(tl.load(seed_ptr + row), tl.load(index_ptr + row)) * total
    chosen = _pick(row_ptr, V, target, key, quota, largest, temperature, floor, BLOCK)
    tl.store(ids_ptr + row, chosen.to(tl.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The sampling parameters of each row: `temperature_R`, `floor_R` (logarithm of min-p) and `top_p_R` float64,
    `top_k_R` int64 (the vocabulary's size: all), `seed_R` and `index_R` int64, whose bits count modulo 2**64."""

    temperature_R: torch.Tensor
    floor_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    seed_R: torch.Tensor
    index_R: torch.Tensor

    @classmethod
    def pack(
        cls,
        *,
        temperatures: Sequence[float],
        min_ps: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        seeds: Sequence[int],
        indices: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> Draws:
        """Packs each row's sampling parameters; a top-k of 0 keeps all tokens. It makes two copies to the device,
        without waiting."""
        with np.errstate(divide="ignore"):
            floors = np.log(np.array(min_ps, dtype=np.float64))
        real = np.stack((np.array(temperatures, dtype=np.float64), floors, np.array(top_ps, dtype=np.float64)))
        limits = [min(top_k or vocab_size, vocab_size) for top_k in top_ks]
        words = [[number % 2**64 for number in numbers] for numbers in (seeds, indices)]
        whole = np.array([limits, *words], dtype=np.uint64).view(np.int64)
        reals, wholes = (to_device(array, device) for array in (real, whole))
        return cls(
            temperature_R=reals[0],
            floor_R=reals[1],
            top_p_R=reals[2],
            top_k_R=wholes[0],
            seed_R=wholes[1],
            index_R=wholes[2],
        )


def draw(logits_RV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Token ids [R], int64, on the logits' device. The logits are float32, after bans, biases and penalties."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}"
    assert logits_RV.stride(1) == 1, f"logits have strides {logits_RV.stride()}"
    assert draws.temperature_R.shape == (num_rows,), f"{len(draws.temperature_R)} draws for {num_rows} rows"
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows == 0:
        return ids_R
    _draw[(num_rows,)](
        logits_RV,
        ids_R,
        draws.temperature_R,
        draws.floor_R,
        draws.top_k_R,
        draws.top_p_R,
        draws.seed_R,
        draws.index_R,
        vocab_size,
        logits_RV.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=_NUM_WARPS,
    )
    return ids_R
