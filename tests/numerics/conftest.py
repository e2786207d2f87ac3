"""Checkpoints made once a session, and the comparison that every numerics test ends with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint

RELATIVE_TOLERANCE = 1e-4

Checkpoint = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(family, **overrides)` is (folder, transformers model)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = folder, make_checkpoint(family, folder, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def target(checkpoint: Checkpoint) -> Path:
    """The model for which heads and draft models draft."""
    return checkpoint("llama")[0]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 of the oracle's largest logit, everywhere."""
    assert ours.shape == theirs.shape
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= RELATIVE_TOLERANCE * theirs.double().abs().max().item(), f"logits differ by {difference:.3g}"
