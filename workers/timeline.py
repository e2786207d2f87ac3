"""When the parts of steps began and how long they took: a ring of spans, filled only while it is recording.

engine's thread   tick  plan  launch [forward  sample]  fetch  apply  tell    one after the other
device            device                    by its own clock on a GPU; else from its launch, or from the end of the
                                            step before
event loop        send  encode              each step's message: cut up for the gateways, serialised
engine's thread   KV gather  KV scatter     within tick or forward: blocks copied out of the cache, and into it
lanes             KV send  KV receive       between two workers, by the clock of the lane's thread"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TypedDict, Unpack

from protos.values import KVPiece, Span
from workers.batch import Batch

MAX_SPANS = 32_768
"""Spans kept: at about eight per step the last 4,000 steps, in 4 MB."""

_UNSEEN: Final = nullcontext()


class SpanFigures(TypedDict, total=False):
    step: int
    num_rows: int
    num_tokens: int
    num_read: int
    num_attended: int
    depth: int  # steps in flight
    kv: KVPiece | None


class Timeline:
    """Callable from any thread. `clock` must never go back; it is read only while recording."""

    def __init__(self, clock: Callable[[], float], *, capacity: int = MAX_SPANS) -> None:
        self._clock = clock
        self._capacity = capacity
        self._spans: deque[Span] | None = None
        self._num_added = 0
        self._lock = threading.Lock()
        self._figures: tuple[Batch | None, SpanFigures] = (None, SpanFigures())

    @property
    def recording(self) -> bool:
        return self._spans is not None

    def now(self) -> float:
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
        self, name: str, batch: Batch | None = None, **figures: Unpack[SpanFigures]
    ) -> AbstractContextManager[object]:
        """A context manager that records a span. Rows and tokens are those of the batch, if there is one."""
        return _UNSEEN if self._spans is None else self._open(name, batch, figures)

    @contextmanager
    def _open(self, name: str, batch: Batch | None, figures: SpanFigures) -> Iterator[None]:
        start_s = self.now()
        try:
            yield
        finally:
            self.add(name, start_s, self.now(), batch, **figures)

    def add(
        self, name: str, start_s: float, end_s: float, batch: Batch | None = None, **figures: Unpack[SpanFigures]
    ) -> None:
        if self._spans is None:
            return
        if batch is not None:
            figures |= self._figures_of(batch)
        span = Span(name=name, start_s=start_s, duration_s=end_s - start_s, **figures)
        with self._lock:
            if self._spans is not None:
                self._spans.append(span)
                self._num_added += 1

    def _figures_of(self, batch: Batch) -> SpanFigures:
        """The batch's figures, cached: counting a large batch for each span would lengthen the step."""
        counted, figures = self._figures
        if counted is not batch:
            figures = SpanFigures(
                num_rows=len(batch.rows),
                num_tokens=batch.num_tokens,
                num_read=batch.num_read,
                num_attended=batch.num_attended,
            )
            self._figures = (batch, figures)
        return figures
