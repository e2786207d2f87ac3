"""Tokens that go past Python: the same events, the same books, and nothing lost when they cannot."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from router.fleet.worker_client import Updates
from router.http.pace import Pace
from router.jobs import Tap
from router.streaming.itl_histogram import AnswerGaps, TokenGaps
from router.streaming.shortcut import Board, Shortcut, Words, compiled
from tests.unit.router.fake_cluster import Cluster, served
from tests.unit.router.fake_worker import expected_tokens
from tests.unit.router.scripted import byte_level

pytestmark = pytest.mark.skipif(compiled() is None, reason="needs a C compiler")

TEXTS = {1: "a", 2: 'say "é"\n', 3: "", 4: None, 5: "<b", 6: "x" * 4000}


class Line:
    """One answer's exit: a connection, read by the test."""

    def __init__(self, *, stops: Sequence[str] = (), has_descriptor: bool = True) -> None:
        self._has_descriptor = has_descriptor
        ours, self.client = socket.socketpair()
        self.client.setblocking(False)
        self._ours = ours
        self.pace = Pace()
        self.waiting, self.rest = "", b""
        self.noted: list[int] = []
        self.shortcut = Shortcut(self.pace, self)
        self.shortcut.speak(Words(TEXTS.get, 10), stops)

    def frame(self) -> tuple[bytes, bytes]:
        return b'data: {"t":"', b'"}\n\n'

    def descriptor(self) -> int | None:
        return os.dup(self._ours.fileno()) if self._has_descriptor else None

    def give_held(self) -> str | None:
        held, self.waiting = self.waiting, ""
        return held

    def take_back(self, held: bytes, rest: bytes) -> None:
        self.waiting += held.decode()
        self.rest += rest

    def note(self, token_ids: Sequence[int], now: float) -> None:
        self.noted += token_ids

    def settle(self) -> None:
        self.shortcut.settle()

    def close(self) -> None:
        self.shortcut.close()

    def open(self, board: Board, number: int = 7) -> None:
        assert self.shortcut.open(board, number, self, self.note)
        for token_id in TEXTS:
            self.shortcut.learn(token_id)

    def read(self) -> bytes:
        got = b""
        try:
            while more := self.client.recv(65536):
                got += more
        except BlockingIOError:
            pass
        return got

    def texts(self) -> list[str]:
        return texts_of(self.read())

    def hang_up(self) -> None:
        self.shortcut.end()
        self._ours.close()
        self.client.close()


def texts_of(chunks: bytes) -> list[str]:
    found = []
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        event, chunks = chunks[: int(size, 16)], chunks[int(size, 16) :]
        assert chunks.startswith(b"\r\n")
        found.append(orjson.loads(event.removeprefix(b"data: "))["t"])
        chunks = chunks[2:]
    return found


@pytest.fixture
def lines() -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(**settings: Any) -> Line:
        made.append(Line(**settings))
        return made[-1]

    yield make
    for line in made:
        line.hang_up()


def test_the_time_between_tokens_is_counted_where_they_are_taken(lines: Callable[..., Line]) -> None:
    """Also that before the first one, after a token that came another way."""
    board, gaps = Board(), TokenGaps((0.25, 0.5, 1.0))
    for number in (1, 2):
        line = lines()
        line.shortcut.gaps = AnswerGaps(gaps, 10.0)
        line.open(board, number)
    assert list(board.deliver([1, 2], [1, 2], 10.25)) == []
    assert list(board.deliver([1], [1], 10.75)) == []
    assert list(board.deliver([1, 2], [1, 4], 13.0)) == [1], "what is not taken is not counted"
    gaps.add(0.1, 2)
    assert gaps.buckets() == [("0.25", 4.0), ("0.5", 5.0), ("1.0", 5.0), ("+Inf", 6.0)]
    assert gaps.sum_s == pytest.approx(0.25 + 0.25 + 0.5 + 2.25 + 0.2)


def test_each_token_is_an_event_and_is_noted_later(lines: Callable[..., Line]) -> None:
    board, line = Board(), lines()
    line.open(board)
    assert list(board.deliver([7, 7, 8, 7, 7], [1, 2, 1, 3, 4], 1.0)) == [2, 4], "nobody's, and parts of a character"
    assert line.texts() == ["a", 'say "é"\n']
    assert line.noted == [], "its layers are not called for each token"
    line.close()
    assert line.noted == [1, 2, 3]
    assert list(board.deliver([7], [1], 2.0)) == [0], "it is closed"
    assert line.texts() == []


def test_what_may_begin_a_stop_string_is_refused(lines: Callable[..., Line]) -> None:
    board, line = Board(), lines(stops=["bb", "é"])
    line.open(board)
    assert list(board.deliver([7, 7, 7], [1, 5, 2], 1.0)) == [1, 2]
    assert line.texts() == ["a"]


def test_a_client_that_reads_slowly_loses_nothing(lines: Callable[..., Line]) -> None:
    board, line = Board(), lines()
    line.open(board)
    num_taken = 0
    while not board.deliver([7], [6], 1.0) and line.noted == []:
        num_taken += 1
    line.close()
    sent = line.read() + line.rest
    assert texts_of(sent) == ["x" * 4000] * len(line.noted), "what was noted was written, or is left to be"
    assert len(line.noted) >= num_taken > 0


def test_texts_wait_while_the_gateway_is_late(lines: Callable[..., Line]) -> None:
    board, line = Board(), lines()
    line.waiting = "_"
    line.open(board)
    line.pace.gap_s = 0.05
    for token_id, now in ((1, 10.0), (1, 10.01), (2, 10.02), (1, 10.06), (1, 10.07)):
        assert not board.deliver([7], [token_id], now)
    assert line.texts() == ["_a", 'asay "é"\na']
    line.pace.flush(10.2)
    assert line.texts() == ["a"], "it does not wait for the next token"
    board.deliver([7], [1], 10.21)
    line.close()
    assert line.waiting == "a", "the slow way says it"
    assert line.noted == [1, 1, 2, 1, 1, 1]


def test_a_text_that_waits_is_not_lost_where_nothing_opens(lines: Callable[..., Line]) -> None:
    line = lines(has_descriptor=False)
    line.waiting = "_"
    for _ in range(2):
        assert not line.shortcut.open(Board(), 7, line, line.note)
        assert line.waiting == "_"


def test_a_text_that_waits_since_it_opened_needs_no_further_message(lines: Callable[..., Line]) -> None:
    board, line = Board(), lines()
    line.pace.gap_s = 0.05
    line.open(board)
    assert board.retry(7, 1, 10.0)
    assert line.texts() == ["a"]
    assert board.retry(7, 1, 10.01)
    assert line.texts() == []
    line.pace.flush(10.2)
    assert line.texts() == ["a"]


async def test_a_token_that_another_answer_has_just_learned_closes_no_short_cut() -> None:
    """Answers in step meet a new word at the same time: one of them learns it, and all go on."""
    board, words, pace = Board(), Words(TEXTS.get, 10), Pace()
    went_round: list[int] = []

    def answer(number: int) -> Updates:
        def take(token_ids: Sequence[int], now: float) -> bool:
            went_round.extend(token_ids)
            return True

        shortcut = Shortcut(pace)
        shortcut.speak(words, ())
        updates = Updates("r", number, board)
        updates.tap = Tap(take, lambda token_ids, now: None, shortcut)
        return updates

    answers = {number: answer(number) for number in (1, 2, 3)}
    readers = [asyncio.ensure_future(anext(one)) for one in answers.values()]
    await asyncio.sleep(0)
    for token_id in (1, 1, 2, 1):
        for place in board.deliver(list(answers), [token_id] * len(answers), 0.0):
            answers[place + 1].put_tokens((token_id,), 0.0)
    assert went_round == [1, 1, 1], "only what came before the short cuts were open"
    for one, reader in zip(answers.values(), readers, strict=True):
        one.close()
        reader.cancel()


def test_numbers_come_and_go(lines: Callable[..., Line]) -> None:
    draw, board, opened, spare = random.Random(5), Board(), dict[int, Line](), list[Line]()
    for _ in range(400):
        number = draw.choice([draw.randrange(1, 60), draw.randrange(2**32)])
        if number in opened:
            spare.append(opened.pop(number))
            spare[-1].close()
        elif len(opened) < 70:
            opened[number] = spare.pop() if spare else lines()
            opened[number].open(board, number)
        asked = [*opened, number]
        left = board.deliver(asked, [3] * len(asked), 1.0)
        assert [asked[place] for place in left] == ([] if number in opened else [number])


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def spoken() -> tuple[int, str]:
    """A prompt whose first ten tokens are whole characters, and what they say."""
    says = byte_level().vocabulary.whole_text
    for prompt in range(4, 512):
        texts = [text for one in expected_tokens((prompt,), 10) if (text := says(one)) is not None]
        if len(texts) == 10 and texts[0] and texts[-1]:
            return prompt, "".join(texts)
    raise AssertionError("no prompt is like that")


async def test_a_worker_dies_and_another_one_goes_on_after_all_that_was_written(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, noted, real = make(), list[int](), Shortcut.settle

    def settle(shortcut: Shortcut) -> None:
        real(shortcut)
        noted.append(1)

    monkeypatch.setattr(Shortcut, "settle", settle)
    await cluster.add("c0", "c1")
    other, dying = cluster["c0"], cluster["c1"]
    prompt, told = spoken()
    body = {"model": "tiny", "prompt": [prompt], "max_tokens": 20, "temperature": 0}
    async with served(cluster) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        other.submitted.clear()
        dying.go(10)
        said, usage = "", None
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if not line or line.endswith("[DONE]"):
                    continue
                event = orjson.loads(line.removeprefix("data: "))
                usage = event["usage"]
                said += "".join(choice["text"] for choice in event["choices"])
                if said == told:
                    await dying.die()
    assert said == whole
    assert usage is not None
    assert usage["completion_tokens"] == 20
    assert [one.output_ids for one in other.submitted] == [tuple(expected_tokens((prompt,), 10))]
    assert noted, "a short cut was open"


async def test_a_client_that_leaves_while_a_short_cut_is_open(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    cluster["c0"].pause_after = 10
    body = {"model": "tiny", "prompt": [spoken()[0]], "max_tokens": 20, "temperature": 0, "stream": True}
    async with served(cluster) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        await cluster["c0"].until(lambda: bool(cluster["c0"].aborted))
        cluster["c0"].go()
        await asyncio.sleep(0)
    assert cluster["c0"].aborted
