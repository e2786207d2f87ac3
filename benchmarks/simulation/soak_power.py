"""Counts the planted bugs that `baton simulate --soak` finds, and the clusters until then.

    python -m benchmarks.simulation.soak_power

Each bug (`benchmarks.simulation.soak_mutants`) runs in another process, over the same seeds, until a cluster breaks.
Prints a table and writes JSON. A bug found after more than `TIMEOUT_S` seconds of wall time counts as not found.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output import write_figures
from benchmarks.simulation.soak_mutants import MUTANTS, ROOT, Mutant

TIMEOUT_S = 1800


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module's source with the bug in it, and leaves no bytecode behind."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self._mutant.applied(Path(self.path).read_text())
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        loader = _Loader(fullname, str(self._mutant.path), self._mutant)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=str(self._mutant.path))


def hunt(mutant: Mutant | None, seeds: range) -> dict[str, Any]:
    """Soaks the code with the bug in it. Runs once in a process: it decides what is imported."""
    if mutant is not None:
        assert mutant.module not in sys.modules, f"{mutant.module} is imported already"
        sys.meta_path.insert(0, _Finder(mutant))
    import logging

    from cluster.simulate.run import soak_trial

    logging.disable(logging.CRITICAL)
    for seed in seeds:
        try:
            soak_trial.run(soak_trial.trial(seed))
        except Exception as error:
            return {"seed": seed, "num_clusters": seed - seeds.start + 1, "why": soak_trial.reason(error)}
    return {"seed": None, "num_clusters": len(seeds), "why": ""}


def _hunted(place: int, seeds: range) -> dict[str, Any]:
    """In another process."""
    command = [sys.executable, "-m", "benchmarks.simulation.soak_power", "--only", str(place)]
    command += ["--first", str(seeds.start), "--seeds", str(len(seeds))]
    name = MUTANTS[place].name if place >= 0 else "no bug"
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "seed": None, "num_clusters": len(seeds), "why": f"not over after {TIMEOUT_S} s"}
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    return {"name": name, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="clusters for each bug")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--match", default="", help="only bugs whose name has this text")
    parser.add_argument("--json", type=Path, default=Path("results/soak_power.json"))
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    if args.only is not None:
        print(json.dumps(hunt(MUTANTS[args.only] if args.only >= 0 else None, seeds)))
        return
    console = Console()
    places = [-1, *(place for place, mutant in enumerate(MUTANTS) if args.match in mutant.name)]
    with ThreadPoolExecutor(args.jobs) as threads:
        rows = []
        for row in threads.map(lambda place: _hunted(place, seeds), places):
            rows.append(row)
            found = f"seed {row['seed']}" if row["seed"] is not None else "not found"
            console.print(f"{row['name']}: {found} {row['why'][:160]}", highlight=False, soft_wrap=True)
    sound, bugs = rows[0], rows[1:]
    table = Table("bug", "clusters until found", "what broke")
    for row in bugs:
        table.add_row(row["name"], str(row["num_clusters"]) if row["seed"] is not None else "-", row["why"][:80])
    console.print(table)
    num_found = sum(row["seed"] is not None for row in bugs)
    without = sound["why"] or "none broken"
    console.print(f"{num_found} of {len(bugs)} bugs found within {args.seeds} clusters; without a bug: {without}")
    write_figures(args.json, seeds=args.seeds, first=args.first, bugs=bugs, sound=sound)


if __name__ == "__main__":
    main()
