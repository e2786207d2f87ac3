"""Tests of names of the hub run against a hub of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.unit.cluster.hub.fake_hub import FakeHub, serving

CHUNK = 1000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    with serving(fake):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
        monkeypatch.chdir(tmp_path)
        yield fake
