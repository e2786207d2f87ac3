"""C is compiled once and kept; without a compiler, or with one that fails, there is none, and the log says why."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvtransfer import prebuilt
from kvtransfer.native import compile_c, load, made_once, prebuild_c
from kvtransfer.prebuilt import instruction_sets, processor_flags

SOURCE = "int twice(int number) { return 2 * number; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "twice.c"
    path.write_text(SOURCE)
    return path


def test_a_library_is_compiled_again_when_its_source_changes(source: Path) -> None:
    library = load(source)
    assert library is not None
    assert library.twice(21) == 42
    folder = source.parent / "cache" / "baton"
    [made] = folder.glob("[!.]*")
    written = made.stat().st_mtime_ns
    assert compile_c(source, folder) == made
    assert made.stat().st_mtime_ns == written
    source.write_text(SOURCE.replace("2 *", "3 *"))
    assert compile_c(source, folder) != made


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    path, begun, may_end, calls = tmp_path / "made.so", threading.Event(), threading.Event(), []

    def make(made: Path) -> None:
        calls.append(made)
        begun.set()
        assert may_end.wait(60)
        made.write_text("whole")

    first, second = (threading.Thread(target=made_once, args=(path, make)) for _ in range(2))
    first.start()
    assert begun.wait(60)
    second.start()
    may_end.set()
    first.join()
    second.join()
    assert len(calls) == 1
    assert path.read_text() == "whole"


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_a_missing_or_failing_compiler_is_reported(
    source: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert load(source) is None
    assert "twice.c is not compiled" in caplog.text


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def prebuilt_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the library of `source` for every instruction set of this architecture, as an image has."""
    folder = source.parent / "prebuilt"
    for instructions in instruction_sets():
        prebuild_c(source, folder, instructions)
    monkeypatch.setenv("BATON_PREBUILT", str(folder))
    return folder


@pytest.mark.usefixtures("prebuilt_folder", "no_compiler")
def test_without_a_compiler_a_prebuilt_library_is_loaded(source: Path) -> None:
    library = load(source)
    assert library is not None
    assert library.twice(21) == 42
    assert not (source.parent / "cache").exists()


@pytest.mark.usefixtures("prebuilt_folder", "no_compiler")
def test_a_library_of_another_version_is_not_loaded(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text(SOURCE.replace("2 *", "3 *"))
    with caplog.at_level(logging.WARNING):
        assert load(source) is None
    assert "there is no C compiler" in caplog.text


def test_a_processor_is_given_the_best_it_can_run_and_never_more(
    source: Path, prebuilt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for instructions in instruction_sets():
        prebuild_path = prebuilt_folder / prebuilt.file_name("twice", instructions, ["-O1"], [source])
        prebuild_path.touch()
    amx, bf16, v4, v3, v1 = (option.needs for option in instruction_sets())
    for has, name in (
        (amx, "amx"), (amx | {"sse2"}, "amx"), (amx - {"amx_tile"}, "bf16"), (bf16, "bf16"), (v4, "v4"), (v3, "v3"),
        (v4 - {"fma"}, "v1"), (v1, "v1"),
    ):  # fmt: skip
        monkeypatch.setattr(prebuilt, "processor_flags", lambda has=has: frozenset(has))
        library = prebuilt.find("twice", ["-O1"], [source])
        assert library is not None
        assert library.name.startswith(f"twice-{name}-")


def test_the_flags_of_this_processor_are_read() -> None:
    info = Path("/proc/cpuinfo")
    if not info.exists() or "\nflags" not in info.read_text():
        pytest.skip("no x86 Linux")
    assert "fpu" in processor_flags()
