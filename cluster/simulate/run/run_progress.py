"""Shows the progress of a run: a bar on a terminal, a line every half minute elsewhere.

A thread polls it, so that watching changes no event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.progress import Progress

from cluster.cli.terminal_tables import BAR_EVERY_S

LINE_EVERY_S = 30.0

Look = Callable[[], tuple[int, str]]
"""Returns the number of ended requests and another text. Callable from any thread."""


class ProgressWatch:
    """Shows a run as a row of `bar`, which the caller has begun. Writes no line before `begin`."""

    def __init__(self, bar: Progress, num_requests: int) -> None:
        self._bar = bar
        self._num_requests = num_requests
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
        if self._look is None:
            return
        num_ended, text = self._look()
        self._bar.update(self._row, completed=num_ended, description=text, refresh=True)
        if not self._bar.console.is_interactive:
            line = f"{num_ended:,} of {self._num_requests:,} requests have ended: {text}"
            self._bar.console.print(line, highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._over.wait(BAR_EVERY_S if self._bar.console.is_interactive else LINE_EVERY_S):
            self.show()
