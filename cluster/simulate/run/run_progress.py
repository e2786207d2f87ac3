"""Shows the progress of a run: a bar on a terminal, a line every half minute elsewhere.

A thread polls it. The simulation sends nothing and waits for nothing, so that watching changes no event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

BAR_EVERY_S = 0.5
LINE_EVERY_S = 30.0
LEAST_TO_FORETELL = 0.01
"""Share of a run before which no estimate of the rest is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """`num_made` of `num_workers` workers are made; then `num_ended` requests have ended, with or without an answer, in
    `at_s` seconds of virtual time. `at_s` is None before the load begins."""

    num_made: int
    num_workers: int
    num_ended: int = 0
    at_s: float | None = None


Look = Callable[[], RunProgress]
"""Callable from any thread."""


def warn(line: str) -> None:
    """Prints a warning on stderr, as one line of any terminal."""
    Console(stderr=True).print(line, style="yellow", highlight=False, soft_wrap=True)


def bars(console: Console) -> Progress:
    """A progress bar for steps that follow one another. Bars disappear at their end."""
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    off = not console.is_interactive  # elsewhere a bar would leave an empty line
    return Progress(*columns, console=console, transient=True, refresh_per_second=1 / BAR_EVERY_S, disable=off)


class ProgressWatch:
    """Shows a run of this many requests, the last of which is due by `until_s`, from `with` to its end, as a row of
    `bar`, which the caller has begun. Writes no line before `begin`."""

    def __init__(
        self, bar: Progress, *, num_requests: int, until_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar = bar
        self._num_requests = num_requests
        self._until_s = until_s
        self._clock = clock
        self._start_s = clock()
        self._look: Look | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, look: Look | None) -> None:
        self._look = look

    def __enter__(self) -> ProgressWatch:
        self._row = self._bar.add_task("workers start", total=self._num_requests)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._bar.remove_task(self._row)

    def show(self) -> None:
        """The bar as it is now, or another line."""
        if self._look is None:
            return
        now, console = self._look(), self._bar.console
        if now.at_s is None:
            text = beside = f"{now.num_made:,} of {now.num_workers:,} workers made"
        else:
            left = self._left(now.num_ended, now.at_s)
            beside = f"{now.at_s:,.0f} virtual s{left}"
            ended = f"{now.num_ended:,} of {self._num_requests:,} requests have ended"
            text = f"{ended} in {now.at_s:,.0f} s of virtual time{left}"
        self._bar.update(self._row, completed=now.num_ended, description=beside, refresh=True)
        if not console.is_interactive:
            console.print(text, highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._over.wait(BAR_EVERY_S if self._bar.console.is_interactive else LINE_EVERY_S):
            self.show()

    def _left(self, num_ended: int, at_s: float) -> str:
        """The remaining share of requests or of virtual time, whichever is smaller. Time decides while few requests are
        due, and requests decide after the last one was sent."""
        share = min(num_ended / self._num_requests, at_s / self._until_s if self._until_s else 1.0)
        if share < LEAST_TO_FORETELL:
            return ""
        return f", about {duration_text((self._clock() - self._start_s) * (1 / share - 1))} left"


def duration_text(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
