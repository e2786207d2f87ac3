"""The short cut of plain tokens in compiled code: from a worker's message to its clients' connections by one call.

    a step's numbers, ids ─▶ Board ─┬─ an open Shortcut: text, event, connection ── later, many at once ─▶ note
                                    └─ all else, or refused ─▶ Updates.put_tokens, one by one

A short cut opens for an answer whose `Tap` has just taken a token, so that every layer has said that it is plain, and
closes when anything else is to be done with the answer: then it `settle`s, and the layers know all that it has taken.
It takes tokens that are whole characters and begin no stop string, for a connection that takes them at once
(docs/adr/0022). Without a compiler there is none, and nothing else changes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import orjson

from kvtransfer.native import Functions, load
from router.streaming.itl_histogram import AnswerGaps

Note = Callable[[Sequence[int], float], None]
"""Is told of tokens that were taken; the last of them at that time (the loop's clock)."""

SETTLED_AFTER = 32
"""Messages of a worker after which an open short cut is settled, so that metrics are never far behind."""

_BROKEN = 0x80000000
_MORE_WORDS = 1024  # models have more ids than their tokenizers
_NEVER = (ctypes.c_uint64 * 4)()

_P, _S, _N, _F = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_double
_FUNCTIONS: Functions = {
    "words_new": ((_N,), _P),
    "words_free": ((_P,), None),
    "words_learn": ((_P, _N, _S, _N, _S, _N), ctypes.c_int),
    "shortcut_new": ((_P, ctypes.c_int, _S, _N, _S, _N, _P, _P), _P),
    "shortcut_free": ((_P,), None),
    "shortcut_counts": ((_P, _P), None),
    "shortcut_settle": ((_P, _P), _F),
    "shortcut_leave": ((_P, _P, _P), None),
    "shortcut_hold": ((_P, _S, _N), ctypes.c_int),
    "shortcut_measure": ((_P, _P, _F), None),
    "board_new": ((), _P),
    "board_free": ((_P,), None),
    "board_open": ((_P, _N, _P), ctypes.c_int),
    "board_close": ((_P, _N), None),
    "board_deliver": ((_P, _P, _P, _N, _F, _P), _N),
    "board_flush": ((_P, _F), _N),
}


class Pacing(Protocol):
    """`router.http.pace.Pace`."""

    gap: ctypes.c_double

    def when_due(self, flush: Callable[[float], bool]) -> None: ...


class Exit(Protocol):
    """Where the events of one answer leave."""

    def frame(self) -> tuple[bytes, bytes]:
        """What is before and behind the JSON string of a text, quotes included."""
        ...

    def descriptor(self) -> int | None:
        """A new one, of the connection, for the short cut to write to and close; None where there can be none."""
        ...

    def give_held(self) -> str | None:
        """The text that waits to be written, which the exit then forgets; None: the way is not clear."""
        ...

    def take_back(self, held: bytes, rest: bytes) -> None:
        """JSON of texts that wait, and the end of an event that the connection has taken the beginning of."""
        ...


class Words:
    """What tokens say, for compiled code. `text_of` gives None for a token that is not plain."""

    def __init__(self, text_of: Callable[[int], str | None], size: int) -> None:
        library = compiled()
        assert library is not None, "ask `compiled` before"
        self._library = library
        self._text_of = text_of
        self._texts: dict[int, str | None] = {}  # of those that were met
        self._size = size + _MORE_WORDS
        self.pointer = library.words_new(self._size)
        if not self.pointer:
            raise MemoryError("no memory for a vocabulary")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.words_free(self.pointer)

    def learn(self, token_id: int) -> bool:
        """Whether the token is plain; from now on compiled code knows it."""
        if not 0 <= token_id < self._size:
            return False
        if token_id not in self._texts:
            text = self._text_of(token_id)
            self._texts[token_id] = text if text is not None and self._tell(token_id, text) else None
        return self._texts[token_id] is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """Of plain tokens that were learned."""
        return "".join([self._texts[token_id] or "" for token_id in token_ids])

    def _tell(self, token_id: int, text: str) -> bool:
        raw, told = text.encode(), orjson.dumps(text)[1:-1]
        return not self._library.words_learn(self.pointer, token_id, raw, len(raw), told, len(told))


class Shortcut:
    """One answer's. Without an `exit` tokens are noted and nothing is written."""

    def __init__(self, pace: Pacing, exit: Exit | None = None) -> None:
        self.pace = pace
        self._exit = exit
        self._words: Words | None = None
        self._stops = _NEVER
        self._library = compiled()
        self._pointer: int | None = None
        self._note: Note | None = None
        self._board: Board | None = None
        self._owner: Owner | None = None
        self._number = 0
        self._has_no_exit = False
        self.gaps: AnswerGaps | None = None  # where the time between tokens is counted, if it is
        self._counts = (ctypes.c_uint32 * 3)()

    def __del__(self) -> None:
        self._free()

    def speak(self, words: Words, stops: Iterable[str]) -> None:
        """What its tokens say, and which texts it must not take the beginning of. Called before it is opened."""
        self._words = words
        if firsts := {stop.encode()[0] for stop in stops}:
            self._stops = (ctypes.c_uint64 * 4)()
            for byte in sorted(firsts):
                self._stops[byte >> 6] |= 1 << (byte & 63)

    def open(self, board: Board, number: int, owner: Owner, note: Note) -> bool:
        """Whether it is open now: tokens of `number` are taken, until it is closed, and noted some time later."""
        assert self._board is None, "it is open already"
        if self._has_no_exit:
            return False
        held = self._exit.give_held() if self._exit is not None else ""
        if held is None:
            return False
        told = orjson.dumps(held)[1:-1]
        if not self._is_made():
            if told and self._exit is not None:
                self._exit.take_back(told, b"")
            return False
        if told:
            _check(self.library.shortcut_hold(self._pointer, told, len(told)))
        if self.gaps is not None:
            self.library.shortcut_measure(self._pointer, self.gaps.of_all.address, self.gaps.last_s)
        board.put(number, self._pointer, owner, self.pace)
        self._board, self._number, self._owner, self._note = board, number, owner, note
        return True

    def interrupt(self) -> None:
        """Something else is to be written, or must know what was."""
        if self._board is not None and self._owner is not None:
            self._owner.close()

    def close(self) -> None:
        """Everything that it has taken is noted, and the exit has what it could not write."""
        board, self._board = self._board, None
        if board is None:
            return
        board.drop(self._number)
        counts = self._counts
        self.library.shortcut_counts(self._pointer, counts)
        if counts[1] or counts[2]:
            held, rest = ctypes.create_string_buffer(counts[1]), ctypes.create_string_buffer(counts[2])
            self.library.shortcut_leave(self._pointer, held, rest)
            assert self._exit is not None
            self._exit.take_back(held.raw, rest.raw)
        self.settle()
        self._owner = self._note = None  # they know us: no circle is left for the collector

    def settle(self) -> None:
        """What it has taken since the last time is noted."""
        if self._pointer is None or self._note is None:
            return
        counts = self._counts
        self.library.shortcut_counts(self._pointer, counts)
        if counts[0]:
            ids = (ctypes.c_uint32 * counts[0])()
            last_s = self.library.shortcut_settle(self._pointer, ids)
            self._note(ids[:], last_s)

    def end(self) -> None:
        """Nothing is written any more."""
        self.interrupt()
        self._free()

    def learn(self, token_id: int) -> bool:
        """Whether a token that was refused may be taken now: another answer may have learned it meanwhile."""
        return self._words is not None and self._words.learn(token_id)

    @property
    def library(self) -> ctypes.PyDLL:
        assert self._library is not None, "nothing opens without it"
        return self._library

    def _is_made(self) -> bool:
        if self._pointer is not None:
            return True
        if self._library is None or self._words is None:
            return False
        before, behind, descriptor = b"", b"", -1
        if self._exit is not None:
            given = self._exit.descriptor()
            if given is None:
                self._has_no_exit = True
                return False
            descriptor, (before, behind) = given, self._exit.frame()
        self._pointer = self._library.shortcut_new(
            self._words.pointer, descriptor, before, len(before), behind, len(behind), self._stops,
            ctypes.addressof(self.pace.gap),
        )  # fmt: skip
        _check(not self._pointer)
        return True

    def _free(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            assert self._board is None, "it is open still"
            self.library.shortcut_free(pointer)


class Owner(Protocol):
    """Of an open short cut."""

    def settle(self) -> None: ...
    def close(self) -> None: ...


class Board:
    """The open short cuts of one worker's connection. Without a compiler, or while it `is_shut`, none opens."""

    def __init__(self) -> None:
        self._library = compiled()
        self._pointer = self._library.board_new() if self._library is not None else None
        self._owners: dict[int, Owner] = {}
        self._settling: Iterator[Owner] = iter(())
        self._pace: Pacing | None = None
        self._left = (ctypes.c_uint32 * 0)()
        self._is_shut = False

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) and self._library is not None:
            self._library.board_free(self._pointer)

    @property
    def is_shut(self) -> bool:
        return self._is_shut or self._pointer is None

    def shut(self, is_shut: bool) -> None:
        """Closes what is open."""
        if is_shut and not self._is_shut:
            for owner in tuple(self._owners.values()):
                owner.close()
        self._is_shut = is_shut

    def put(self, number: int, pointer: int | None, owner: Owner, pace: Pacing) -> None:
        assert self._library is not None
        _check(self._library.board_open(self._pointer, number, pointer))
        self._owners[number] = owner
        self._pace = pace

    def drop(self, number: int) -> None:
        assert self._library is not None
        self._library.board_close(self._pointer, number)
        del self._owners[number]

    def deliver(self, numbers: Sequence[int], token_ids: Sequence[int], now: float) -> Sequence[int]:
        """The places of tokens that were not taken."""
        if not self._owners or self._library is None:
            return range(len(numbers))
        if len(numbers) > len(self._left):
            self._left = (ctypes.c_uint32 * (2 * len(numbers)))()
        given, told = array("I", numbers), array("I", token_ids)
        num_left = self._library.board_deliver(
            self._pointer, given.buffer_info()[0], told.buffer_info()[0], len(given), now, self._left
        )
        left = self._left[:num_left]
        broken = [place - _BROKEN for place in left if place >= _BROKEN]
        for place in broken:
            self._owners[numbers[place]].close()
        self._flush_later()
        self._settle_some()
        return [place for place in left if place < _BROKEN] if broken else left

    def retry(self, number: int, token_id: int, now: float) -> bool:
        """Whether an open one has taken a token."""
        assert self._library is not None
        one = (ctypes.c_uint32 * 3)(number, token_id)
        at = ctypes.addressof(one)
        if self._library.board_deliver(self._pointer, at, at + 4, 1, now, at + 8):
            if one[2] < _BROKEN:
                return False
            self._owners[number].close()
        self._flush_later()
        return True

    def _flush_later(self) -> None:
        """Texts may wait."""
        if self._pace is not None and self._pace.gap.value:
            self._pace.when_due(self._flush)

    def _flush(self, now: float) -> bool:
        return self._library is not None and bool(self._library.board_flush(self._pointer, now))

    def _settle_some(self) -> None:
        """Each in its turn."""
        for _ in range(-(-len(self._owners) // SETTLED_AFTER)):
            owner = next(self._settling, None)
            if owner is None:
                self._settling = iter(tuple(self._owners.values()))
                return
            owner.settle()


@cache
def compiled() -> ctypes.PyDLL | None:
    """shortcut.c as a library; None without a compiler. The first call on a machine takes a second."""
    return load(Path(__file__).with_suffix(".c"), _FUNCTIONS)


def _check(failed: int | bool) -> None:
    if failed:
        raise MemoryError("no memory for a short cut")
