"""The suite itself: what happens to it when a test takes its process with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


SCHEDULER = "from tests.conftest import pytest_xdist_make_scheduler\n"


def told(tmp_path: Path) -> str:
    plugins = "-p no:asyncio -p no:hypothesispytest -p no:anyio -p no:cacheprovider".split()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n2", "--dist=loadfile", "--no-loadscope-reorder", *plugins, str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return ran.stdout + ran.stderr


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
    (tmp_path / "conftest.py").write_text(SCHEDULER)
    assert "2 failed, 22 passed" in told(tmp_path)


TOGETHER = """
import os, pathlib, time

def test_0():
    pathlib.Path(__file__).with_suffix(".here").touch()
    while len(list(pathlib.Path(__file__).parent.glob("*.here"))) < 2:
        time.sleep(0.01)
    os._exit(1)
"""
SLOW = """
import os, time
from pathlib import Path

def pytest_collection_modifyitems():
    while os.environ.get("PYTEST_XDIST_WORKER") == "gw3" and not (Path(__file__).parent / "ran").exists():
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_successor_is_not_given_tests_before_it_knows_them(tmp_path: Path) -> None:
    """Two processes die at once, and of those that take their places one has found the tests first."""
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(TOGETHER)
    for name in "cdef":
        (tmp_path / f"test_{name}.py").write_text("def test_0(): open('ran', 'w').close()")
    (tmp_path / "conftest.py").write_text(SCHEDULER + SLOW)
    assert "2 failed, 4 passed" in told(tmp_path)
