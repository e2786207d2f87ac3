"""The random numbers are Philox4x32-10, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workers.sampling.philox import philox4x32, uniforms


def words(text: str) -> Any:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


# Random123 1.14, tests/kat_vectors, the lines "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_uniforms_use_the_first_two_words() -> None:
    (value,) = uniforms([0], [0])
    assert value == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_every_bit_of_seed_and_index_counts() -> None:
    seeds = [0, *(1 << bit for bit in range(64)), *[0] * 64]
    indices = [*[0] * 65, *(1 << bit for bit in range(64))]
    values = uniforms(seeds, indices)
    assert len(set(values.tolist())) == len(seeds)
    assert ((values >= 0) & (values < 1)).all()


def test_seeds_outside_64_bits_wrap() -> None:
    assert uniforms([-1], [3]) == uniforms([2**64 - 1], [3])
