"""Shows the progress of a run: a bar on a terminal, a line every half minute elsewhere.

A thread polls it. The simulation sends nothing and waits for nothing, so that watching changes no event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from protos.hints import counted

BAR_EVERY_S = 0.5
LINE_EVERY_S = 30.0
LEAST_TO_FORETELL = 0.01
"""Share of a run before which no estimate of the rest is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """Progress before the load begins: the number of workers made. When all are made, the gateways connect to them."""

    num_made: int
    num_workers: int

    def __str__(self) -> str:
        if self.num_made >= self.num_workers:
            return f"gateways meet {counted(self.num_workers, 'worker')}"
        return f"{self.num_made:,} of {counted(self.num_workers, 'worker')} made"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of the load: `num_ended` requests have ended, with or without an answer, in `at_s` seconds of virtual
    time."""

    num_ended: int
    at_s: float


def warn(line: str) -> None:
    """Prints a warning on stderr, as one line of any terminal."""
    Console(stderr=True).print(line, style="yellow", highlight=False, soft_wrap=True)


Look = Callable[[], StartProgress | RunProgress]
"""Callable from any thread."""


def bars(console: Console) -> Progress:
    """A progress bar for steps that follow one another. Bars disappear at their end."""
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    off = not console.is_interactive  # elsewhere a bar would leave an empty line
    return Progress(*columns, console=console, transient=True, refresh_per_second=1 / BAR_EVERY_S, disable=off)


class ProgressWatch:
    """Shows a run of this many requests, the last of which is due by `until_s`, from `with` to its end: beside the rows
    of `above`, begun by the caller, if given. Writes no line before `begin`. Writes to `console` only."""

    def __init__(
        self,
        console: Console,
        *,
        num_requests: int,
        until_s: float,
        above: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_requests = num_requests
        self._until_s = until_s
        self._clock = clock
        self._start_s = clock()
        self._look: Look | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._owns = above is None
        self._bar = None if not console.is_interactive else bars(console) if above is None else above
        self._row = TaskID(0)

    def begin(self, look: Look | None) -> None:
        self._look = look

    def __enter__(self) -> ProgressWatch:
        if self._bar is not None:
            self._row = self._bar.add_task("workers start", total=self._num_requests)
            if self._owns:
                self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None and self._owns:
            self._bar.stop()
        elif self._bar is not None:
            self._bar.remove_task(self._row)

    def show(self) -> None:
        """The bar as it is now, or another line."""
        match self._look and self._look():
            case StartProgress() as starting:
                self._tell(0, str(starting), str(starting))
            case RunProgress(num_ended=num_ended, at_s=at_s) as standing:
                left = self._left(standing)
                ended = f"{num_ended:,} of {self._num_requests:,} requests have ended"
                line = f"{ended} in {at_s:,.0f} s of virtual time{left}"
                self._tell(num_ended, f"{at_s:,.0f} virtual s{left}", line)

    def _tell(self, num_ended: int, beside_bar: str, line: str) -> None:
        if self._bar is not None:
            self._bar.update(self._row, completed=num_ended, description=beside_bar, refresh=True)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._over.wait(LINE_EVERY_S if self._bar is None else BAR_EVERY_S):
            self.show()

    def _left(self, standing: RunProgress) -> str:
        """The remaining share of requests or of virtual time, whichever is smaller. Time decides while few requests are
        due, and requests decide after the last one was sent."""
        share = min(standing.num_ended / self._num_requests, standing.at_s / self._until_s if self._until_s else 1.0)
        if share < LEAST_TO_FORETELL:
            return ""
        return f", about {duration_text((self._clock() - self._start_s) * (1 / share - 1))} left"


def duration_text(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
