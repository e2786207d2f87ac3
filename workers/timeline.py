"""When the parts of steps began and how long they took: a ring of spans, filled only while it is recording.

    engine's thread   tick  plan  launch [forward  sample]  fetch  apply  tell    one after the other
    device            device                    by its own clock on a GPU; else from its launch, or from the end of the
                                                step before
    event loop        send  encode              each step's message: cut up for the gateways, serialised
    engine's thread   KV gather  KV scatter     within tick or forward: blocks copied out of the cache, and into it
    lanes             KV send  KV receive       between two workers, by the clock of the lane's thread

While nothing is recorded a span costs a method call and reads no clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from protos.values import KVPiece, Span
from workers.batch import Batch

MAX_SPANS = 32_768
"""Spans kept: at about eight per step the last 4,000 steps, in 4 MB."""

_UNSEEN: Final = nullcontext()
_NO_FIGURES = (0, 0, 0)


class Timeline:
    """Callable from any thread. `clock` must never go back; it is read only while recording."""

    def __init__(self, clock: Callable[[], float], *, capacity: int = MAX_SPANS) -> None:
        self._clock = clock
        self._capacity = capacity
        self._spans: deque[Span] | None = None
        self._num_added = 0
        self._lock = threading.Lock()
        self._figures: tuple[Batch | None, tuple[int, int, int]] = (None, _NO_FIGURES)

    @property
    def recording(self) -> bool:
        return self._spans is not None

    def now(self) -> float:
        """Now, by the clock of the spans."""
        return self._clock()

    def record(self, recording: bool | None = None) -> tuple[tuple[Span, ...], int]:
        """Returns the spans so far, by their ends, and the number of older ones that were dropped. Then recording
        restarts (True), ends (False), or continues as it was (None)."""
        with self._lock:
            spans = self._spans
            taken = (tuple(spans), self._num_added - len(spans)) if spans is not None else ((), 0)
            if recording is not None:
                self._spans = deque(maxlen=self._capacity) if recording else None
                self._num_added = 0
        return taken

    def span(
        self,
        name: str,
        batch: Batch | None = None,
        *,
        step: int = 0,
        num_rows: int = 0,
        depth: int = 0,
        kv: KVPiece | None = None,
    ) -> AbstractContextManager[object]:
        """A context manager that records a span. `depth` counts steps in flight; rows and tokens are those of the
        batch, if there is one."""
        if self._spans is None:
            return _UNSEEN
        return _Open(self, name, batch, step, num_rows, depth, kv)

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        batch: Batch | None = None,
        *,
        step: int = 0,
        num_rows: int = 0,
        depth: int = 0,
        kv: KVPiece | None = None,
    ) -> None:
        """Records a span whose times are known."""
        if self._spans is None:
            return
        num_tokens, num_read, num_attended = self._figures_of(batch)
        span = Span(
            name=name,
            start_s=start_s,
            duration_s=end_s - start_s,
            step=step,
            num_rows=len(batch.rows) if batch is not None else num_rows,
            num_tokens=num_tokens,
            num_read=num_read,
            num_attended=num_attended,
            depth=depth,
            kv=kv,
        )
        with self._lock:
            if self._spans is not None:
                self._spans.append(span)
                self._num_added += 1

    def _figures_of(self, batch: Batch | None) -> tuple[int, int, int]:
        """Cached for the batch's other spans: counting a large batch for each would lengthen the step."""
        if batch is None:
            return _NO_FIGURES
        known, figures = self._figures
        if known is not batch:
            figures = (batch.num_tokens, batch.num_read, batch.num_attended)
            self._figures = (batch, figures)
        return figures


class _Open:
    def __init__(
        self,
        timeline: Timeline,
        name: str,
        batch: Batch | None,
        step: int,
        num_rows: int,
        depth: int,
        kv: KVPiece | None,
    ) -> None:
        self._timeline = timeline
        self._name = name
        self._batch = batch
        self._step = step
        self._num_rows = num_rows
        self._depth = depth
        self._kv = kv
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = self._timeline.now()

    def __exit__(self, *raised: object) -> None:
        timeline = self._timeline
        timeline.add(
            self._name, self._start_s, timeline.now(), self._batch,
            step=self._step, num_rows=self._num_rows, depth=self._depth, kv=self._kv,
        )  # fmt: skip
