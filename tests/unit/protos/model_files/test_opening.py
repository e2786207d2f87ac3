"""Paths that are models: what a path in Hugging Face's cache is called, and what a wrong one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import BadCheckpoint
from protos.model_files.opening import model_name, open_model


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A repository in the cache, in the form that `hf download` writes."""
    repository = tmp_path / "models--Acme--Tiny-1.5"
    folder = repository / "snapshots" / "0f3c"
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "tiny-q4-00001-of-00002.gguf"):
        (repository / "blobs" / f"hash-of-{name[:4]}").write_text("{}")
        (folder / name).symlink_to(f"../../blobs/hash-of-{name[:4]}")
    return folder


def test_a_model_in_the_cache_has_the_repositorys_name(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(snapshot)
    names = [model_name(path) for path in (snapshot, tmp_path / "current", snapshot / "tiny-q4-00001-of-00002.gguf")]
    assert names == ["Tiny-1.5", "Tiny-1.5", "tiny-q4"]
    assert model_name(tmp_path / "snapshots" / "own") == "own"
    assert open_model(snapshot).json("config.json") == {}


def test_a_repository_of_the_cache_is_refused_with_its_snapshots(snapshot: Path) -> None:
    with pytest.raises(BadCheckpoint, match=str(snapshot)):
        open_model(snapshot.parent.parent)
