"""C is compiled once and kept; without a compiler, or with one that fails, there is none, and the log says why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtransfer.native import compile_c, load

SOURCE = "int twice(int number) { return 2 * number; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "twice.c"
    path.write_text(SOURCE)
    return path


def test_a_library_is_compiled_once_and_again_when_its_source_changes(source: Path) -> None:
    library = load(source)
    assert library is not None
    assert library.twice(21) == 42
    folder = source.parent / "cache" / "baton"
    [made] = folder.iterdir()
    written = made.stat().st_mtime_ns
    assert compile_c(source, folder) == made
    assert made.stat().st_mtime_ns == written
    source.write_text(SOURCE.replace("2 *", "3 *"))
    assert compile_c(source, folder) != made


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_a_compiler_that_is_missing_or_fails_is_said_and_survived(
    source: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert load(source) is None
    assert "twice.c is not compiled" in caplog.text
