"""Shows the start of workers in a terminal: a bar each, or without a terminal a line for every change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.supervision.lifecycle import LifeState
from cluster.supervision.supervisor import SupervisedWorker

log = logging.getLogger("baton.cluster")


class Bars:
    """Bars from `with` to `done`; afterwards, and without a terminal, lines in the log."""

    def __init__(self, console: Console) -> None:
        self._progress = _bars(console) if console.is_terminal else None
        self._rows: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Bars:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done()

    def done(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step(self, what: str) -> Callable[[], None]:
        """A slow step other than the workers; call the result when it is done."""
        if self._progress is None:
            log.info("%s", what)
            return lambda: None
        progress, row = self._progress, self._progress.add_task(what, total=None, state="")
        return lambda: progress.update(row, visible=False)

    def show(self, view: SupervisedWorker) -> None:
        state = _words(view)
        if self._progress is None:
            # Progress of reading weights is not logged, and the supervisor logs why a worker died.
            before, self._shown[view.worker_id] = self._shown.get(view.worker_id), view.life.state
            if before != view.life.state and view.life.state in (LifeState.STARTING, LifeState.SERVING):
                log.info("worker %s: %s", view.worker_id, state, extra={"worker": view.worker_id})
            return
        if view.worker_id not in self._rows:
            self._rows[view.worker_id] = self._progress.add_task(view.worker_id, total=1.0, state=state)
        self._progress.update(self._rows[view.worker_id], completed=view.loaded, state=state)


def _bars(console: Console) -> Progress:
    name, state = TextColumn("{task.description:<14}"), TextColumn("{task.fields[state]}")
    return Progress(name, BarColumn(30), state, TimeElapsedColumn(), console=console, transient=True)


def _words(view: SupervisedWorker) -> str:
    match view.life.state:
        case LifeState.STARTING if view.loaded:
            return view.loading
        case LifeState.SERVING if view.info is not None:
            return f"serves at {view.info.address}"
        case LifeState.WAITING:
            return f"waits to be started again, deaths in a row: {view.life.num_failures}"
        case state:
            return str(state)
