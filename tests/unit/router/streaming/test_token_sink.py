"""Tokens that are taken ahead of the generators: the same events, the same books, and nothing lost when they cannot
be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from protos.values import FinishReason, SequenceUpdate
from router.fleet.worker_client import Updates
from router.http.pace import Pace
from router.http.protocol import WriteState
from router.streaming.itl_histogram import ChoiceTimes, ItlHistogram
from router.streaming.token_sink import REPORT_S, SinkTable, TokenSink, compiled
from router.text.vocabulary import TokenColumns

pytestmark = pytest.mark.skipif(compiled() is None, reason="needs a C compiler")

SPECIAL = 7
TEXTS = TokenColumns(["", "a", 'say "é"\n', "", None, "<b", "x" * 4000, "<|s|>"], frozenset({SPECIAL}))
BOUNDS = (0.25, 0.5, 1.0)


class Connection:
    """Where the events of one choice go: kept by the test."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.write = self._write
        self.state = WriteState()
        self.is_broken = False

    def make_clear(self) -> bool:
        return not self.state.blocked

    def frame(self, *, is_reasoning: bool) -> list[bytes]:
        return [b'data: {"r":"', b'","t":"', b'"}\n\n'] if is_reasoning else [b'data: {"t":"', b'"}\n\n']

    def texts(self) -> list[str]:
        received = texts_of(b"".join(self.chunks))
        self.chunks.clear()
        return received

    def _write(self, chunk: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("the handler is closed")
        self.chunks.append(chunk)


class Choice:
    """One choice's sink, with its connection."""

    def __init__(self, pace: Pace | None = None, itl: ItlHistogram | None = None, **settings: Any) -> None:
        self.connection, self.pace = Connection(), pace or Pace()
        self.times = ChoiceTimes(itl or ItlHistogram(BOUNDS))
        self.times.begin(1, 0.0)
        self.sink = TokenSink(TEXTS, self.times, self.pace, self.connection, **settings)


def texts_of(chunks: bytes) -> list[str]:
    texts = []
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        event, chunks = chunks[: int(size, 16)], chunks[int(size, 16) :]
        assert chunks.startswith(b"\r\n")
        texts.append(orjson.loads(event.removeprefix(b"data: "))["t"])
        chunks = chunks[2:]
    return texts


def left(table: SinkTable, numbers: Sequence[int], token_ids: Sequence[int], now: float) -> list[int]:
    return list(table.deliver(numbers, token_ids, now)[0])


def test_the_time_between_tokens_is_counted_where_they_are_taken() -> None:
    table, itl = SinkTable(), ItlHistogram(BOUNDS)
    choices = {number: Choice(itl=itl) for number in (1, 2)}
    for number, choice in choices.items():
        choice.times.last_s = 10.0
        choice.sink.open(table, number, 10.0)
    assert left(table, [1, 2], [1, 2], 10.25) == []
    assert left(table, [1], [1], 10.75) == []
    assert left(table, [1, 2], [1, 4], 13.0) == [1], "what is not taken is not counted"
    itl.add(0.1, 2)
    assert itl.buckets() == [("0.25", 4.0), ("0.5", 5.0), ("1.0", 5.0), ("+Inf", 6.0)]
    assert itl.sum_s == pytest.approx(0.25 + 0.25 + 0.5 + 2.25 + 0.2)
    assert choices[1].sink.report(13.0) == (1, 1, 1)
    assert (choices[1].times.last_s, choices[1].times.num_tokens) == (13.0, 4)


def test_each_token_is_an_event_and_is_reported_later() -> None:
    table, choice = SinkTable(), Choice()
    choice.sink.open(table, 7, 1.0)
    assert left(table, [7, 7, 8, 7, 7], [1, 2, 1, 3, 4], 1.0) == [2, 4], "no such sink, and parts of a character"
    assert choice.connection.texts() == ["a", 'say "é"\n']
    assert choice.sink.report(1.0) == (1, 2, 3)
    assert choice.sink.report(1.0) == ()
    assert (choice.sink.num_taken_of(2), choice.sink.num_taken_of(9)) == (2, 1)
    assert left(table, [7], [1], 2.0) == [0], "it is closed"
    assert choice.connection.texts() == []


def test_special_tokens_are_shown_only_where_they_are_asked_for() -> None:
    for skips, shown in ((True, []), (False, ["<|s|>"])):
        table, choice = SinkTable(), Choice(skip_special_tokens=skips)
        choice.sink.open(table, 1, 1.0)
        assert left(table, [1], [SPECIAL], 1.0) == []
        assert choice.connection.texts() == shown


def test_beginnings_of_stop_strings_are_refused() -> None:
    table, choice = SinkTable(), Choice(stops=["bb", "é"])
    choice.sink.open(table, 7, 1.0)
    assert left(table, [7, 7, 7], [1, 5, 2], 1.0) == [1, 2]
    assert choice.connection.texts() == ["a"]


@pytest.mark.parametrize("reason", [WriteState.PAUSED, WriteState.CORKED, WriteState.CLOSED])
def test_a_blocked_transport_is_not_written_to(reason: int) -> None:
    table, choice = SinkTable(), Choice()
    choice.sink.open(table, 7, 1.0)
    choice.connection.state.block(reason)
    assert left(table, [7], [1], 1.0) == [0]
    choice.connection.state.unblock(reason)
    assert left(table, [7], [1], 1.0) == []
    choice.connection.is_broken = True
    assert left(table, [7], [1], 1.0) == [0], "what fails is not taken"
    assert choice.sink.report(1.0) == (1,)
    assert choice.connection.texts() == ["a"]
    assert choice.connection.state.sent_s == 1.0


def test_texts_wait_while_the_gateway_is_late() -> None:
    table, choice = SinkTable(), Choice()
    choice.sink.open(table, 7, 1.0)
    choice.pace.gap_s = 0.05
    for token_id, now in ((1, 10.0), (1, 10.01), (2, 10.02), (1, 10.06), (1, 10.07)):
        assert left(table, [7], [token_id], now) == []
    assert choice.connection.texts() == ["a", 'asay "é"\na']
    choice.pace.flush(10.2)
    assert choice.connection.texts() == ["a"], "it does not wait for the next token"
    assert left(table, [7], [1], 10.21) == []
    assert choice.sink.report(10.21) == (1, 1, 2, 1, 1, 1)
    assert [text for _, text in choice.sink.held()] == [b"a"], "the generators say it"
    assert choice.sink.held() == [], "once"


def test_a_waiting_text_needs_no_further_message() -> None:
    table, choice = SinkTable(), Choice()
    choice.pace.gap_s = 0.05
    choice.sink.open(table, 7, 10.0)
    assert left(table, [7, 7], [1, 1], 10.0) == []
    assert choice.connection.texts() == ["a"]
    choice.sink.report(10.01)
    choice.pace.flush(10.02)
    choice.sink.open(table, 7, 10.03)
    choice.pace.flush(10.2)
    assert choice.connection.texts() == ["a"]


def test_reasoning_has_its_own_events_without_marks() -> None:
    table, choice = SinkTable(), Choice(marks=frozenset({3, SPECIAL}))
    choice.sink.turn(is_reasoning=True)
    choice.sink.open(table, 7, 1.0)
    choice.pace.gap_s = 0.05
    assert left(table, [7, 7, 7, 7], [1, 3, 2, SPECIAL], 1.0) == [1, 3]
    [chunk] = choice.connection.chunks
    assert b'data: {"r":"a","t":"a"}' in chunk
    assert choice.sink.report(1.01) == (1, 2)
    choice.connection.chunks.clear()
    choice.sink.turn(is_reasoning=False)
    [(frame, text)] = choice.sink.held()
    assert (len(frame), text) == (3, b'say \\"\xc3\xa9\\"\\n'), "what waits has the frame of before"
    choice.sink.open(table, 7, 2.0)
    assert left(table, [7], [1], 2.0) == []
    assert choice.connection.texts() == ["a"]


def test_a_client_that_reads_slowly_loses_nothing() -> None:
    """Data that is held while the transport is paused is written later, or by the generators."""
    table, choice = SinkTable(), Choice()
    choice.sink.open(table, 7, 10.0)
    choice.pace.gap_s = 0.05
    assert left(table, [7, 7], [6, 1], 10.0) == []
    choice.connection.state.block(WriteState.PAUSED)
    choice.pace.flush(11.0)
    assert left(table, [7], [2], 11.0) == [0]
    assert choice.connection.texts() == ["x" * 4000]
    assert [text for _, text in choice.sink.held()] == [b"a"]


def test_a_piece_on_its_way_goes_before_the_next_token() -> None:
    table, choice = SinkTable(), Choice()
    choice.sink.enqueue()
    choice.sink.open(table, 7, 1.0)
    assert left(table, [7], [1], 1.0) == [0]
    choice.sink.dequeue(1.0)
    assert left(table, [7], [1], 1.0) == []
    choice.sink.is_clear = False  # the text layer holds half a character back
    choice.sink.close()
    choice.sink.open(table, 7, 1.0)
    assert left(table, [7], [1], 1.0) == [0]


def test_sinks_that_open_together_report_at_different_times() -> None:
    table, choices = SinkTable(), [Choice() for _ in range(64)]
    for number, choice in enumerate(choices):
        choice.sink.open(table, number, 0.0)
    reported = []
    for step in range(32):
        numbers = [number for number in range(64) if number not in reported]
        refused, due = table.deliver(numbers, [1] * len(numbers), REPORT_S * (step + 1.01) / 32)
        assert not refused
        assert len(due) == 2
        reported += [numbers[place] for place in due]
        for place in due:
            choices[numbers[place]].sink.report(0.0)
    assert sorted(reported) == list(range(64))


def test_numbers_come_and_go() -> None:
    draw, table, opened, spare = random.Random(5), SinkTable(), dict[int, Choice](), list[Choice]()
    for _ in range(400):
        number = draw.choice([draw.randrange(1, 60), draw.randrange(2**32)])
        if number in opened:
            spare.append(opened.pop(number))
            spare[-1].sink.report(0.0)
        elif len(opened) < 70:
            opened[number] = spare.pop() if spare else Choice()
            opened[number].sink.open(table, number, 0.0)
        asked = [*opened, number]
        refused = left(table, asked, [3] * len(asked), 0.001)
        assert [asked[place] for place in refused] == ([] if number in opened else [number])


# -- between a worker's updates and their reader ----------------------------------------------------------------------


async def reading(updates: Updates) -> asyncio.Future[SequenceUpdate]:
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    return waiting


async def test_tokens_wait_for_a_reader_that_is_behind() -> None:
    table, choice = SinkTable(), Choice()
    updates = Updates("r", 7, table)
    updates.attach(choice.sink)
    assert left(table, [7], [1], 0.0) == [0], "nobody waits for the next: what came before may not have been taken yet"
    updates.put(SequenceUpdate(request_id="r", token_ids=(1,)))
    assert (await anext(updates)).token_ids == (1,)
    waiting = await reading(updates)
    assert left(table, [7], [2], 0.0) == []
    updates.put(SequenceUpdate(request_id="r", token_ids=(3,), finish_reason=FinishReason.STOP))
    assert left(table, [7], [4], 0.0) == [0]
    assert (await waiting).token_ids == (2, 3), "the layers account for the taken one, too"
    assert choice.sink.num_taken_of(2) == 1
    assert choice.connection.texts() == [TEXT_OF_2]


async def test_a_cancelled_reader_accounts_for_written_tokens() -> None:
    table, choice = SinkTable(), Choice()
    updates = Updates("r", 7, table)
    updates.attach(choice.sink)
    seen: list[int] = []

    async def read() -> None:
        async for update in updates:
            seen.extend(update.token_ids)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    assert left(table, [7, 7], [1, 1], 0.0) == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [1, 1]
    assert left(table, [7], [1], 0.0) == [0], "closed"


TEXT_OF_2 = 'say "é"\n'
