"""What every benchmark writes: JSON with the command and the machine beside the figures, and plots."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.measured_on import find_hardware, find_versions

JsonFile = Annotated[Path | None, typer.Option("--json", help="File for the figures.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="File for a plot (needs matplotlib).")]
Groups = Mapping[str, Mapping[str, float]]


def write_figures(file: Path | None, **figures: Any) -> None:
    """Nothing is written where `file` is None."""
    if file is not None:
        machine = {"command": _command(), "hardware": asdict(find_hardware()), "versions": dict(find_versions())}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(machine | figures, indent=1) + "\n")


@contextmanager
def drawing(
    path: Path,
    *,
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    sharex: bool = False,
    sharey: bool = False,
) -> Iterator[Any]:
    """A grid of axes, saved to `path` at the end. The file has no date, so that the same figures give the same file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    figure.savefig(path, dpi=110, metadata={"Date": None})


def write_bars(figures: Groups, *, unit: str, json_file: Path | None, plot: Path | None) -> None:
    """Figures as {group: {series: value}}; a group need not have every series. `unit`: "ms of one core"."""
    write_figures(json_file, unit=unit, figures=figures)
    if plot is not None:
        hardware = find_hardware()
        _draw_bars(figures, f"{unit}; {hardware.cpu}, {hardware.num_cores} cores", plot)


def _command() -> str:
    """The command line, without the files for figures and plots."""
    parts, flags = Path(sys.argv[0]).with_suffix("").parts, list(sys.argv[1:])
    module = ".".join(parts[parts.index("benchmarks") :] if "benchmarks" in parts else parts[-1:])
    for flag in ("--json", "--plot"):
        if flag in flags:
            del flags[flags.index(flag) : flags.index(flag) + 2]
    return shlex.join(["python", "-m", module, *flags])


def _draw_bars(figures: Groups, label: str, path: Path) -> None:
    series = list(dict.fromkeys(name for values in figures.values() for name in values))
    height = 0.8 / len(series)
    with drawing(path, size=(8, 1 + 0.3 * len(series) * len(figures))) as [[axes]]:
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
