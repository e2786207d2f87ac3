from __future__ import annotations

from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import hashing
from kvtransfer.hashing import Remembering, chain_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_hash_is_made_from_parent_and_little_endian_tokens() -> None:
    first, second = chain_hashes([1, 2, 3, 70000], 2, salt=b"tenant")
    packed = bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert first == blake2b(root_hash(b"tenant") + packed, digest_size=16).digest()
    assert second == blake2b(first + bytes([3, 0, 0, 0, 0x70, 0x11, 1, 0]), digest_size=16).digest()


def test_only_full_blocks_have_a_hash() -> None:
    assert chain_hashes(range(15), 16) == []
    assert len(chain_hashes(range(16), 16)) == 1
    assert chain_hashes(range(31), 16) == chain_hashes(range(16), 16)


@given(TOKENS, TOKENS)
def test_a_chain_may_be_extended(before: list[int], after: list[int]) -> None:
    before = before[: len(before) // 4 * 4]
    prefix = chain_hashes(before, 4, salt=b"s")
    extended = chain_hashes(after, 4, salt=b"s", parent=prefix[-1] if prefix else None)
    assert prefix + extended == chain_hashes(before + after, 4, salt=b"s")


@given(TOKENS, st.integers(0, 39))
def test_a_changed_token_changes_its_block_and_all_behind(tokens: list[int], place: int) -> None:
    place = min(place, len(tokens) - 1)
    changed = list(tokens)
    if changed:
        changed[place] = (changed[place] + 1) % 2**32
    pairs = zip(chain_hashes(tokens, 4), chain_hashes(changed, 4), strict=True)
    assert [a == b for a, b in pairs] == [block < place // 4 for block in range(len(tokens) // 4)]


def test_tenants_share_no_hash() -> None:
    tokens = range(64)
    assert not {*chain_hashes(tokens, 16, salt=b"a")} & {
        *chain_hashes(tokens, 16, salt=b"b"),
        *chain_hashes(tokens, 16),
    }


def test_a_salt_may_be_long() -> None:
    assert chain_hashes(range(4), 4, salt=b"x" * 1000) != chain_hashes(range(4), 4, salt=b"x" * 1001)


@pytest.mark.parametrize("num_blocks", [1, 9])
@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70])
def test_a_token_id_beyond_32_bits_is_refused(token_id: int, num_blocks: int) -> None:
    with pytest.raises(OverflowError):
        chain_hashes([*range(num_blocks - 1), token_id], 1)


def test_whatever_holds_the_tokens_their_hashes_are_the_same() -> None:
    tokens = range(2**32 - 200, 2**32)
    first = chain_hashes(tokens, 7)
    assert len(first) == 28
    assert chain_hashes(list(tokens), 7) == chain_hashes(tuple(tokens), 7) == first
    with pytest.raises(TypeError):
        chain_hashes(["no", *tokens], 7)  # type: ignore[list-item]


@given(st.binary(min_size=16, max_size=16), st.integers(1, 100), st.integers(0, 9), st.randoms(use_true_random=False))
def test_compiled_code_and_hashlib_give_the_same(parent: bytes, words: int, num_blocks: int, rng: Random) -> None:
    ids = [rng.randrange(2**32) for _ in range(words * num_blocks)]
    hashes = chain_hashes(ids, words, parent=parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "compiled", lambda: None)
        assert chain_hashes(ids, words, parent=parent) == hashes


def test_a_prompt_caches_hashes_by_salt_and_block_size() -> None:
    for seed in range(6):
        prompt = tuple(Random(seed).choices(range(2**32), k=100))
        remembering = Remembering(prompt)
        for _ in range(2):
            for size in (4, 16):
                for salt in (b"", b"tenant"):
                    assert chain_hashes(remembering, size, salt=salt) == chain_hashes(prompt, size, salt=salt)
                    rest, tail, parent = prompt[size:], remembering[size:], chain_hashes(prompt, size, salt=salt)[0]
                    assert chain_hashes(rest, size, parent=parent) == chain_hashes(tail, size, parent=parent)
                    assert chain_hashes(remembering, size, parent=parent) == chain_hashes(prompt, size, parent=parent)
