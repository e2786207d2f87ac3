"""Measures a running cluster under several loads: a JSON file for each, and a table of all.

python -m benchmarks.gateway.sweep --out results                         a cluster at http://127.0.0.1:8000
python -m benchmarks.gateway.sweep --out results --trace trace.jsonl      and a Mooncake trace, scaled to it
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

OBJECTIVE = ("--set", "objectives.ttft_ms=500", "--set", "objectives.tpot_ms=100")
PROMPTS = ("--set", "workload.input_len=64:512", "--set", "workload.output_len=64")
LOADS: dict[str, tuple[str, ...]] = {
    "1 at a time": ("--concurrency", "1", "--set", "workload.requests=16", *PROMPTS),
    "8 at a time": ("--concurrency", "8", "--set", "workload.requests=64", *PROMPTS),
    "32 at a time": ("--concurrency", "32", "--set", "workload.requests=128", *PROMPTS),
    "2 a second": ("--set", "workload.rate=2", "--set", "workload.requests=64", *PROMPTS),
}
TRACE = ("--set", "workload.trace_scale=0.02", "--set", "workload.requests=100", "--concurrency", "4")


def sweep(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")],
    url: Annotated[str, typer.Option(help="The server's root.")] = "http://127.0.0.1:8000",
    trace: Annotated[Path | None, typer.Option(help="A trace in Mooncake's format.")] = None,
) -> None:
    """Runs every load in turn; ends with the first that fails."""
    out.mkdir(parents=True, exist_ok=True)
    loads = LOADS | (
        {"a trace, 4 at a time": ("--set", f"workload.trace={trace}", *TRACE)} if trace is not None else {}
    )
    rows = []
    for name, flags in loads.items():
        file = out / f"{name.replace(',', '').replace(' ', '-')}.json"
        command = [sys.executable, "-c", "from cluster.cli.main import main; main()", "bench"]
        typer.echo(f"\n{name}: baton bench {' '.join(flags)}")
        subprocess.run([*command, "--url", url, *flags, *OBJECTIVE, "--json", str(file)], check=True)
        rows.append(row(name, json.loads(file.read_text())["figures"]))
    head = "| load | req/s | output tok/s | TTFT p50 / p99 | TPOT p50 / p99 | cached |"
    typer.echo("\n".join(["", head, "|---|---|---|---|---|---|", *rows]))


def row(name: str, figures: dict[str, Any]) -> str:
    """A line of a Markdown table; times in milliseconds."""

    def times(which: str, digits: int) -> str:
        spread = figures[which]
        return f"{spread['p50'] * 1000:,.{digits}f} / {spread['p99'] * 1000:,.{digits}f} ms" if spread else "-"

    cached = figures["cached_share"]
    cells = (
        name,
        f"{figures['requests_per_s']:.2f}",
        f"{figures['output_tokens_per_s']:,.0f}",
        times("ttft_s", 0),
        times("tpot_s", 1),
        "-" if cached is None else f"{cached:.0%}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(sweep)
