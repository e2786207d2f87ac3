"""Folders of processes that were killed are removed by the next one; those in use are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.scratch import Scratch

KILLED = """
import os, pathlib, sys
from cluster.scratch import Scratch
Scratch(pathlib.Path(sys.argv[1]))
os._exit(9)
"""


def test_what_a_killed_process_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    living = Scratch(tmp_path)
    (tmp_path / "baton-of-somebody").mkdir()  # without a sign of ours it is left alone
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 3
    mine = Scratch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, mine.path.name, "baton-of-somebody"}
    for scratch in (living, mine):
        scratch.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["baton-of-somebody"]
