"""Tables that fit a terminal: names and figures are never broken; columns that do not fit are dropped with a note."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns
PROSE = 16  # a column of prose is not made narrower than this
PIPED_COLUMNS = 160
BAR_EVERY_S = 0.5
WORDS = frozenset({
    "pool", "worker", "state", "address", "on", "peer", "over", "ticket", "way", "with", "tier", "request", "prefill",
    "decode", "role", "what", "fleet", "decision", "by", "from", "to", "outcome",
})  # fmt: skip
"""Columns that are aligned left; figures are aligned right."""


def result_console() -> Console:
    """A pipe has room for every column."""
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def warn(line: str) -> None:
    """Prints a warning on stderr, as one line of any terminal."""
    Console(stderr=True).print(line, style="yellow", highlight=False, soft_wrap=True)


def bars(console: Console) -> Progress:
    """A progress bar for steps that follow one another. Bars disappear at their end."""
    text = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), text, TimeElapsedColumn(), TimeRemainingColumn())
    off = not console.is_interactive  # elsewhere a bar would leave an empty line
    return Progress(*columns, console=console, transient=True, refresh_per_second=1 / BAR_EVERY_S, disable=off)


def show(answer: Any, shown: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Prints a gateway's answer as it is, or as people read it."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        result_console().print(shown())


class Sheet:
    """A table that shrinks in this order: headers wrap at spaces; prose wraps; `spare` columns are dropped, the first
    one first; records are printed as a line for each field.

    `left`: columns besides `WORDS` that are aligned left; `prose`: columns whose text may wrap; `whole`: the option
    that prints every column.
    """

    def __init__(
        self,
        title: str,
        *columns: str,
        left: Sequence[str] = (),
        prose: Sequence[str] = (),
        spare: Sequence[str] = (),
        whole: str = "--json",
    ) -> None:
        self._title, self._whole = title, whole
        self._columns = columns
        self._left, self._prose = WORDS.union(left, prose), frozenset(prose)
        self._spare = [name for name in spare if name in columns]
        self._rows: list[tuple[Text, ...]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for num_left_out in range(len(self._spare) + 1):
            left_out = self._spare[:num_left_out]
            places = [place for place, name in enumerate(self._columns) if name not in left_out]
            widths = self._fit(places, options.max_width)
            if widths is not None:
                yield self._table(widths)
                if left_out:
                    names = ", ".join(" ".join(name.split()) for name in self._columns if name in left_out)
                    yield Text(f"a wider terminal, or {self._whole}, also shows {names}", "dim")
                return
        yield from self._records()

    def _fit(self, places: Sequence[int], room: int) -> Mapping[int, int] | None:
        """The width of each column; None if they do not fit."""
        cells = {place: max((row[place].cell_len for row in self._rows), default=0) for place in places}
        headers = {place: [Text(line).cell_len for line in self._columns[place].split("\n")] for place in places}
        words = {place: [Text(word).cell_len for word in self._columns[place].split()] for place in places}
        room -= GAP * (len(places) - 1)
        for lengths in (headers, words):
            widths = {place: max(cells[place], *lengths[place], 0) for place in places}
            excess = sum(widths.values()) - room
            if excess <= 0:
                return widths
        for place in places:
            if self._columns[place] in self._prose:
                cut = max(0, min(excess, widths[place] - PROSE))
                widths[place] -= cut
                excess -= cut
        return widths if excess <= 0 else None

    def _table(self, widths: Mapping[int, int]) -> Table:
        table = Table(
            title=self._title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
        )
        for place, width in widths.items():
            name = self._columns[place]
            table.add_column(name, justify="left" if name in self._left else "right", overflow="fold", width=width)
        for row in self._rows:
            table.add_row(*(row[place] for place in widths))
        return table

    def _records(self) -> Iterator[RenderableType]:
        if self._title:
            yield Text(self._title, "bold")
        for row in self._rows:
            for place, (name, cell) in enumerate(zip(self._columns, row, strict=True)):
                lead = "" if place == 0 else f"  {' '.join(name.split())} " if name else "  "
                if cell.plain:
                    yield Text.assemble((lead, "dim"), cell)
