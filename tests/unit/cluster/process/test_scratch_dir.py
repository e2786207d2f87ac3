"""Folders of processes that were killed are removed by the next one; those in use are not."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.process.scratch_dir import OWNED, Scratch, share
from protos.errors import Misconfigured

KILLED = """
import os, pathlib, sys
from cluster.process.scratch_dir import Scratch
Scratch(pathlib.Path(sys.argv[1]))
os._exit(9)
"""


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    living = Scratch(tmp_path)
    (tmp_path / "baton-of-somebody").mkdir()  # without a sign of ours it is left alone
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 3
    mine = Scratch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, mine.path.name, "baton-of-somebody"}
    for scratch in (living, mine):
        scratch.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["baton-of-somebody"]


def test_a_shared_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    """Its name is known to every user of the machine, who could have made it before."""
    os.close(share(tmp_path / "ours"))
    os.close(share(tmp_path / "ours"))
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for name in ("open", "link"):
        with pytest.raises(Misconfigured, match=f"{name} must be a folder that only this user may use: remove it"):
            share(tmp_path / name)


def test_an_abandoned_shared_folder_is_removed_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An orderly stop on a Ray cluster leaves such folders on its nodes."""
    caplog.set_level(logging.INFO)
    os.close(share(tmp_path / "baton-run-node"))
    Scratch(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []
    assert "baton-run-node: the processes that used it have ended" in caplog.text
    assert "killed" not in caplog.text


@pytest.mark.parametrize(("module", "call"), [(os, "open"), (fcntl, "flock")])
def test_a_shared_folder_that_is_removed_meanwhile_is_made_anew(
    module: Any, call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, original, removals = tmp_path / "ours", getattr(module, call), ["the folder"]

    def removed_first(*args: Any, **options: Any) -> Any:
        if removals:
            removals.pop()
            shutil.rmtree(folder)
        return original(*args, **options)

    monkeypatch.setattr(module, call, removed_first)
    lock = share(folder)
    assert not removals
    assert os.path.samestat(os.fstat(lock), (folder / OWNED).stat())
    os.close(lock)
