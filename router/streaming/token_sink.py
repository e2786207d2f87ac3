"""Plain tokens of a choice, taken where a worker's message is read and written to the response at once, by compiled
code.

    worker's message ─▶ SinkTable ─┬─ an open TokenSink: text, event, `write` of the connection's transport
                                   │       └─ at most REPORT_S later, and before anything else of the sequence:
                                   │          one update with all tokens taken ───────────────────────┐
                                   └─ all else ─▶ Updates ─▶ generators, from layer to layer, ◀───────┘
                                                             which account for every token and write the rest"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from kvtransfer.native import Functions, load
from router.streaming.itl_histogram import ChoiceTimes

REPORT_S = 1.0
"""The generators learn of a taken token no later than this, while tokens come."""

NUM_PHASES = 32
"""Sinks that open together report at this many different times within `REPORT_S`."""

_DUE = 0x80000000
_MAX_REFUSED = 8
_P, _S, _N, _F = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_double
_FUNCTIONS: Functions = {
    "sink_new": ((_P, ctypes.c_int, _P, _P, _P), _P),
    "sink_write_to": ((_P, ctypes.py_object, _P, _S, _N, _N, _N, ctypes.c_int), ctypes.c_int),
    "sink_refuse": ((_P, _P, _N), None),
    "sink_free": ((_P,), None),
    "sink_begin": ((_P, _F, _F), None),
    "sink_num_taken": ((_P,), _N),
    "sink_num_held": ((_P,), _N),
    "sink_report": ((_P, _P), _F),
    "sink_give_held": ((_P, _P), None),
    "table_new": ((), _P),
    "table_free": ((_P,), None),
    "table_open": ((_P, _N, _P), ctypes.c_int),
    "table_close": ((_P, _N), None),
    "table_deliver": ((_P, _P, _P, _N, _F, _P), _N),
    "table_flush": ((_P, _F), _N),
}


class Pacing(Protocol):
    """`router.http.pace.Pace`."""

    gap: ctypes.c_double

    def when_due(self, flush: Callable[[float], bool]) -> None: ...


class TokenTexts(Protocol):
    """`router.text.vocabulary.TokenColumns`."""

    address: int


class EventFrame(Protocol):
    """Where a choice's text is written: `router.http.sse.ChoiceEvents`."""

    @property
    def write(self) -> Callable[[bytes], Any]:
        """The transport's."""
        ...

    @property
    def state(self) -> ctypes.Structure:
        """`router.http.protocol.WriteState`."""
        ...

    def make_clear(self) -> bool:
        """True if the transport has sent all earlier data and would take an event now."""
        ...

    def frame(self, *, is_reasoning: bool) -> list[bytes]:
        """The constant parts around the JSON string of a text; three parts if an event has it twice."""
        ...


def _first_bytes(texts: Iterable[str]) -> frozenset[int]:
    return frozenset(text.encode()[0] for text in texts)


class TokenSink:
    """The sink of one choice. Without `events` tokens are taken and not written. The text layer clears `is_clear` while
    it holds text back."""

    def __init__(
        self,
        texts: TokenTexts,
        times: ChoiceTimes,
        pace: Pacing,
        events: EventFrame | None = None,
        *,
        skip_special_tokens: bool = True,
        stops: Iterable[str] = (),
        marks: frozenset[int] = frozenset(),
        ends: Iterable[str] = (),
    ) -> None:
        """`marks`: tokens that the sink leaves to the generators. `ends`: texts after which reasoning ends."""
        self._texts = texts
        self._skips_special = skip_special_tokens
        self._firsts = _first_bytes(stops)
        self._marks, self._ends = marks, _first_bytes(ends)
        assert len(marks) <= _MAX_REFUSED, marks
        self._is_reasoning = False
        self._held_before: list[tuple[Sequence[bytes], bytes]] = []
        self._frame: Sequence[bytes] = ()
        self._times = times
        self._pace = pace
        self._events = events
        self._pointer: int | None = None
        self._place: tuple[SinkTable, int] | None = None
        self._is_open = False
        self._due_s = 0.0
        self._num_queued = 0
        self._num_reported = 0
        self.is_clear = True

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) is not None and (library := compiled()) is not None:
            library.sink_free(self._pointer)

    @property
    def writes(self) -> bool:
        return self._events is not None

    def open(self, table: SinkTable, number: int, now: float) -> None:
        """The reader waits: tokens of `number` may be taken while nothing is on its way."""
        if compiled() is not None:
            self._place = (table, number)
            self._open(now)

    def close(self) -> None:
        """No token is taken from now on."""
        place, self._place = self._place, None
        if place is not None and self._is_open:
            self._is_open = False
            place[0].drop(place[1])

    def enqueue(self) -> None:
        """Records that a piece of the choice is on its way to the response, between other choices' pieces."""
        self._num_queued += 1
        place = self._place
        self.close()
        self._place = place

    def dequeue(self, now: float) -> None:
        self._num_queued -= 1
        self._open(now)

    def report(self, now: float) -> tuple[int, ...]:
        """The tokens taken since the last report, which go through the generators now. Closes the sink."""
        self.close()
        if self._pointer is None or not (count := _library().sink_num_taken(self._pointer)):
            return ()
        ids = (ctypes.c_uint32 * count)()
        self._times.took(count, _library().sink_report(self._pointer, ids))
        self._due_s = now + REPORT_S
        self._num_reported += count
        return tuple(ids)

    def num_taken_of(self, num_tokens: int) -> int:
        """How many of the next tokens from the generators the sink has already reported."""
        num_taken = min(self._num_reported, num_tokens)
        self._num_reported -= num_taken
        return num_taken

    def held(self) -> list[tuple[Sequence[bytes], bytes]]:
        """Texts that wait, as JSON, each with its frame. The caller writes them first."""
        held, self._held_before = self._held_before, []
        if self._pointer is not None and (count := _library().sink_num_held(self._pointer)):
            last = ctypes.create_string_buffer(count)
            _library().sink_give_held(self._pointer, last)
            held.append((self._frame, last.raw))
        return held

    def turn(self, *, is_reasoning: bool) -> None:
        """Changes the frame of the events. The sink is closed and has reported all its tokens."""
        if is_reasoning == self._is_reasoning:
            return
        if self._pointer is not None:
            assert not self._is_open
            self._held_before = self.held()
            _library().sink_free(self._pointer)
            self._pointer = None
        self._is_reasoning = is_reasoning

    def _open(self, now: float) -> None:
        if self._place is None or self._is_open or self._num_queued or not self.is_clear:
            return
        if self._events is not None and not self._events.make_clear():
            return
        (table, number), library = self._place, _library()
        if self._pointer is None:
            self._pointer = self._made(library)
            self._due_s = now + REPORT_S * (number % NUM_PHASES + 1) / NUM_PHASES
        library.sink_begin(self._pointer, self._times.last_s, self._due_s)
        table.put(number, self._pointer, self._pace)
        self._is_open = True

    def _made(self, library: ctypes.PyDLL) -> int:
        stops = (ctypes.c_uint64 * 4)()
        for byte in self._ends if self._is_reasoning else self._firsts:
            stops[byte >> 6] |= 1 << (byte & 63)
        gap, itl = ctypes.addressof(self._pace.gap), self._times.itl.address
        made = library.sink_new(self._texts.address, self._skips_special, stops, gap, itl)
        _check(not made)
        if ids := self._marks:
            library.sink_refuse(made, (ctypes.c_uint32 * len(ids))(*ids), len(ids))
        if (events := self._events) is not None:
            self._frame = events.frame(is_reasoning=self._is_reasoning)
            before, *between, behind = self._frame
            self._write = events.write  # compiled code has borrowed it
            state, middle = ctypes.addressof(events.state), b"".join(between)
            sizes = len(before), len(middle), len(behind)
            failed = library.sink_write_to(made, self._write, state, before + middle + behind, *sizes, bool(between))
            _check(failed)
        return int(made)


class SinkTable:
    """The open sinks of one worker's connection."""

    def __init__(self) -> None:
        library = compiled()
        self._pointer = library.table_new() if library is not None else None
        self._num_open = 0
        self._pace: Pacing | None = None
        self._left = (ctypes.c_uint32 * 0)()

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) and (library := compiled()) is not None:
            library.table_free(self._pointer)

    def put(self, number: int, pointer: int, pace: Pacing) -> None:
        _check(_library().table_open(self._pointer, number, pointer))
        self._num_open += 1
        self._pace = pace
        if pace.gap.value:
            pace.when_due(self._flush)

    def drop(self, number: int) -> None:
        _library().table_close(self._pointer, number)
        self._num_open -= 1

    def deliver(
        self, numbers: Sequence[int], token_ids: Sequence[int], now: float
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the places of tokens that were not taken, and of tokens after which a sink's report is due."""
        if not self._num_open:
            return range(len(numbers)), ()
        if len(numbers) > len(self._left):
            self._left = (ctypes.c_uint32 * (2 * len(numbers)))()
        given, ids = array("I", numbers), array("I", token_ids)
        num_left = _library().table_deliver(
            self._pointer, given.buffer_info()[0], ids.buffer_info()[0], len(given), now, self._left
        )
        if self._pace is not None and self._pace.gap.value:
            self._pace.when_due(self._flush)
        if not num_left:
            return (), ()
        left = self._left[:num_left]
        return [place for place in left if place < _DUE], [place - _DUE for place in left if place >= _DUE]

    def _flush(self, now: float) -> bool:
        return bool(_library().table_flush(self._pointer, now))


@cache
def compiled() -> ctypes.PyDLL | None:
    """token_sink.c as a library; None without a compiler. The first call on a machine takes a second."""
    return load(Path(__file__).with_suffix(".c"), _FUNCTIONS)


def _library() -> ctypes.PyDLL:
    library = compiled()
    assert library is not None, "nothing opens without it"
    return library


def _check(failed: int | bool) -> None:
    if failed:
        raise MemoryError("no memory for a token sink")
