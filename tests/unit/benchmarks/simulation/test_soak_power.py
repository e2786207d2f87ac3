"""The soak finds bugs that `benchmarks.simulation.soak_power` plants: those of its latest invariants."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.simulation.soak_mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_fits_the_code_it_is_planted_in(mutant: Mutant) -> None:
    """Whoever changes that code writes the bug anew."""
    compile(mutant.applied(mutant.path.read_text()), str(mutant.path), "exec")


@pytest.mark.parametrize(
    ("name", "seed", "why"),
    [
        ("leak: an aborted answer stays on its worker", 41, "which ended"),
        ("tokens: a slow client's last ones are said twice when its worker is lost", 45, "it must be"),
        ("logprobs: positions that are cached have none", 1, "'s prompt are of tokens"),
        ("leases: blocks that land do not extend it", 30, "is expired"),
        ("leases: what is sent does not extend the sender's", 30, "could not be passed on: the lease"),
        ("off by one: a batch has a sequence too many", 25, "a sequence too many"),
        ("leak: shared blocks of a push that is stopped", 65, "their holders know of"),
    ],
)
def test_a_planted_bug_is_found(name: str, seed: int, why: str) -> None:
    place = [mutant.name for mutant in MUTANTS].index(name)
    command = [
        sys.executable,
        "-m",
        "benchmarks.simulation.soak_power",
        "--only",
        str(place),
        "--first",
        str(seed),
        "--seeds",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["seed"] == seed
    assert why in report["why"]
