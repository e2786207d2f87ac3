"""A hint is worth giving only where it is right."""

from __future__ import annotations

import pytest

from protos.hints import counted, listed, nearest

KNOWN = ("stop", "seed", "tp", "n", "max_tokens", "presence_penalty", "temperature", "block_size", "num_blocks", "cuda")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stops", "stop"), ("sede", "seed"), ("tpp", "tp"), ("tempature", "temperature"), ("MaxTokens", "max_tokens"),
        ("block-size", "block_size"), ("cdua", "cuda"),
        ("top_k", None), ("x", None), ("repetition_penalty", None), ("block", None), ("batch_size", None), ("", None),
    ],
)  # fmt: skip
def test_a_name_is_meant_only_if_it_is_near(name: str, meant: str | None) -> None:
    assert nearest(name, KNOWN) == meant


def test_a_long_list_says_how_much_longer_it_is() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_singular_and_plural_are_right() -> None:
    assert [counted(num, "thread") for num in (0, 1, 1200)] == ["0 threads", "1 thread", "1,200 threads"]
