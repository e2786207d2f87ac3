"""A chain is a sequence of its hashes, whichever way it was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.chain import Chain

HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=6)


@given(HASHES, HASHES, st.slices(6))
def test_a_chain_is_the_sequence_of_its_hashes(hashes: list[bytes], more: list[bytes], part: slice) -> None:
    chain = Chain.of(hashes)
    assert chain == hashes
    assert tuple(hashes) == chain
    assert len(chain) == len(hashes)
    assert [chain[place] for place in range(-len(hashes), len(hashes))] == hashes * 2
    assert chain[part] == hashes[part]
    assert chain + more == hashes + more
    assert hash(chain) == hash(tuple(hashes))
    assert (chain == Chain.of(more)) == (hashes == more)


def test_a_chain_ends_where_its_hashes_do() -> None:
    with pytest.raises(IndexError):
        Chain(bytes(32))[2]
    with pytest.raises(ValueError, match="17 bytes"):
        Chain(bytes(17))
