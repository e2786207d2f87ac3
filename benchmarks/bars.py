"""A benchmark's figures as what all of them write: JSON with the machine they were taken on, and bars with its name.

Bars stand in groups: {group: {series: value}}; a group need not have every series.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cluster.bench.hardware import find_hardware, find_versions

JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Where to draw them (needs matplotlib).")]
Groups = Mapping[str, Mapping[str, float]]


def write(figures: Groups, *, unit: str, json_file: Path | None, plot: Path | None) -> None:
    """`unit` names what the values are, for people: "ms of one core". What is None is not written."""
    hardware = find_hardware()
    if json_file is not None:
        told = {
            "command": _command(),
            "hardware": asdict(hardware),
            "versions": find_versions(),
            "unit": unit,
            "figures": figures,
        }
        json_file.write_text(json.dumps(told, indent=1) + "\n")
    if plot is not None:
        _draw(figures, f"{unit}; {hardware.cpu}, {hardware.num_cores} cores", plot)


def _command() -> str:
    """As it was called, but for where the figures went."""
    parts, flags = Path(sys.argv[0]).with_suffix("").parts, list(sys.argv[1:])
    module = ".".join(parts[parts.index("benchmarks") :] if "benchmarks" in parts else parts[-1:])
    for flag in ("--json", "--plot"):
        if flag in flags:
            del flags[flags.index(flag) : flags.index(flag) + 2]
    return shlex.join(["python", "-m", module, *flags])


def _draw(figures: Groups, label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    series = list(dict.fromkeys(name for values in figures.values() for name in values))
    height = 0.8 / len(series)
    canvas = Figure(figsize=(8, 1 + 0.3 * len(series) * len(figures)))
    axes = canvas.subplots()
    for number, name in enumerate(series):
        mine = [(place, values[name]) for place, values in enumerate(figures.values()) if name in values]
        bars = axes.barh(
            [place + number * height for place, _ in mine], [value for _, value in mine], height, label=name
        )
        axes.bar_label(bars, fmt="{:,.4g}", fontsize=7, padding=2)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(figures))], list(figures), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(label, fontsize=8)
    axes.legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(path, metadata={"Date": None})
