"""The list of what waits for a GPU: each call does what it has time for, and the next continues from there."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from benchmarks.gpu.verify import CHECKS, ROOT, Check, verify


def check(name: str, code: str, limit_s: float = 60.0) -> Check:
    return Check(name=name, proves="nothing", arguments=("-c", code), limit_s=limit_s)


class Calls:
    """Seconds pass only between one look at the clock and the next."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.told: list[str] = []

    def verify(self, *checks: Check, commit: str = "abc", budget_s: float = 500.0) -> dict[str, int | None]:
        ticks = count()
        outcomes = verify(
            checks,
            self.out,
            budget_s=budget_s,
            commit=commit,
            clock=lambda: float(next(ticks)),
            report=self.told.append,
        )
        return {outcome.name: outcome.exit_code for outcome in outcomes}

    def recorded(self) -> dict[str, int | None]:
        told = json.loads((self.out / "verified.json").read_text())
        return {outcome["name"]: outcome["exit_code"] for outcome in told["outcomes"]}


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "out")


def test_passed_checks_are_skipped_and_failed_ones_repeated(calls: Calls) -> None:
    good, bad = check("good", "print('fine')"), check("bad", "raise SystemExit(3)")
    assert calls.verify(good, bad) == {"good": 0, "bad": 3}
    assert calls.verify(good, bad) == {"bad": 3}
    assert calls.recorded() == {"good": 0, "bad": 3}
    assert (calls.out / "good.log").read_text() == "fine\n"
    assert calls.verify(good, commit="def") == {"good": 0}, "another commit has proved nothing"


def test_nothing_begins_that_might_not_end_in_time(calls: Calls) -> None:
    assert calls.verify(check("long", "", limit_s=400.0), check("short", ""), budget_s=100.0) == {"short": 0}
    assert any("not begun" in line and "long" in line for line in calls.told)


def test_a_hung_check_is_stopped_with_its_progress(calls: Calls) -> None:
    hanging = "import time; print('begun', flush=True); time.sleep(60)"
    assert calls.verify(check("hangs", hanging, limit_s=1.0)) == {"hangs": None}
    assert (calls.out / "hangs.log").read_text() == "begun\n"


def test_every_check_names_files_and_fits_ten_minutes() -> None:
    assert len({entry.name for entry in CHECKS}) == len(CHECKS)
    for one in CHECKS:
        assert one.limit_s <= 540
        paths = [argument for argument in one.arguments if argument.startswith(("tests", "benchmarks"))]
        assert paths
        files = (f"{path.replace('.', '/')}.py" if path.startswith("benchmarks.") else path for path in paths)
        assert all((ROOT / file).exists() for file in files)


LACKED = {
    "ray",
    "peft",
    "accelerate",
    "openai",
    "anthropic",
    "psycopg",
    "boto3",
    "jsonschema",
    "schemathesis",
    "trustme",
    "cryptography",
    "kubernetes_validate",
}
BARE = f"""
import importlib.util
import sys
LACKED = {sorted(LACKED)!r}
class Lacked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Lacked())
find_spec = importlib.util.find_spec  # by which transformers asks what there is
importlib.util.find_spec = lambda name, package=None: None if name in LACKED else find_spec(name, package)
import pytest
raise SystemExit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_checks_import_only_torch_and_pytest() -> None:
    """Such a machine is lent for minutes: there is no index of packages, and no time."""
    paths = [argument for check in CHECKS for argument in check.arguments if argument.startswith("tests/")]
    done = subprocess.run([sys.executable, "-c", BARE, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
