"""Runs the benchmarks that a CPU can, one after another, in under ten minutes: `make bench`.

    python -m benchmarks.cpu_set --out results        a JSON file and a plot each, their tables on the terminal
    python -m benchmarks.cpu_set --only router        one of them

Nothing else should run meanwhile: wall clocks are measured. Peers (vLLM, llama.cpp, Dynamo) need environments of their
own and are left out here: docs/performance.md has them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cluster.bench.measured_on import find_hardware

LIMIT_S = 300.0
# Name -> module and flags.
SET: dict[str, tuple[str, ...]] = {
    "attention": ("benchmarks.engine.cpu_attention",),
    "engine": ("benchmarks.engine.cpu_engine", "--divisor", "8", "--repeat", "1"),
    "prefix-index": ("benchmarks.routing.prefix_index",),
    "router": ("benchmarks.gateway.router",),
    "kvtransfer": ("benchmarks.transfer.lanes", "--runs", "3", "--requests", "0"),
    "host-tier": ("benchmarks.transfer.host_tier", "--rounds", "3"),
}


def run_set(
    out: Annotated[Path, typer.Option(help="Folder for JSON files and plots.")] = Path("results"),
    only: Annotated[str, typer.Option(help=f"One of {', '.join(SET)}.")] = "",
) -> None:
    """Exits with 1 when a benchmark failed; the others have run anyway."""
    if only and only not in SET:
        raise typer.BadParameter(f"there is no benchmark {only!r}: choose one of {', '.join(SET)}", param_hint="--only")
    out.mkdir(parents=True, exist_ok=True)
    typer.echo(f"on {find_hardware().cpu}; results go to {out}")
    failed = []
    for number, name in enumerate([only] if only else SET, 1):
        typer.echo(f"\n[{number}/{1 if only else len(SET)}] {name}", err=True)
        start_s = time.monotonic()
        if not _run(name, out):
            failed.append(name)
        typer.echo(f"{name}: {time.monotonic() - start_s:.0f} s", err=True)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _run(name: str, out: Path) -> bool:
    module, *flags = SET[name]
    flags += ["--json", str(out / f"{name}.json"), "--plot", str(out / f"{name}.svg")]
    try:
        return subprocess.run([sys.executable, "-m", module, *flags], timeout=LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        typer.echo(f"{name} took longer than {LIMIT_S:g} s", err=True)
        return False


if __name__ == "__main__":
    typer.run(run_set)
