"""The suite itself: what happens to it when a test takes its process with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_process_that_dies_costs_one_test_and_no_more(tmp_path: Path) -> None:
    """One dies in the middle of its second file, one in the last test of all."""
    for name in "abcdef":
        tests = [f"def test_{number}(): pass" for number in range(4)]
        if name == "d":
            tests[1] = "def test_1(): os._exit(1)"
        if name == "f":
            tests[3] = "def test_3(): os._exit(1)"
        (tmp_path / f"test_{name}.py").write_text("import os\n" + "\n".join(tests))
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    plugins = "-p no:asyncio -p no:hypothesispytest -p no:anyio -p no:cacheprovider".split()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n2", "--dist=loadfile", "--no-loadscope-reorder", *plugins, str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "2 failed, 22 passed" in ran.stdout, ran.stdout + ran.stderr
