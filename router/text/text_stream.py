"""An ask's jobs, run and told as text: the one way from tokens to words, for chat, completions and gRPC.

Ask ──jobs──▶ Generate, one each ──TokenDelta──▶ Writer (detokenise, stop strings) ──Piece──▶ merged, as they come
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain

from protos.values import FinishReason, Logprobs
from router.jobs import Generate, Tap, TokenDelta
from router.streaming.shortcut import Pacing, Shortcut
from router.text.detokenizer import Detokenizer
from router.text.sampling_request import Ask
from router.text.stop_strings import StopStrings
from router.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one delta added to choice `index`. `text_offsets`: where in the choice's text each token begins.

    `num_tokens` counts the tokens made, also those that are not shown. `finish_reason` ends the choice.
    `num_prompt_computed`: as a `TokenDelta` has it.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    num_prompt_computed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """`cached_tokens` of the prompts were computed by nobody for this request, whatever choice looked for them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Say:
    """A `Tap` of text. Both are called with a choice, what it goes on with, of how many tokens, and the loop's clock:
    `say` is asked to say it (False: it becomes a piece), `note` is told that the `shortcut` has done so."""

    say: Callable[[int, str, int, float], bool]
    note: Callable[[int, str, int, float], None]
    shortcut: Shortcut | None = None

    def under(
        self, note: Callable[[int, str, int, float], None], settled: Callable[[int, str, int, float], None]
    ) -> Say:
        """For the layer below, whose `note` learns of what was said, and `settled` of what the short cut has said."""
        say_above, note_above = self.say, self.note

        def say(index: int, text: str, num_tokens: int, now: float) -> bool:
            if not say_above(index, text, num_tokens, now):
                return False
            note(index, text, num_tokens, now)
            return True

        def both(index: int, text: str, num_tokens: int, now: float) -> None:
            note_above(index, text, num_tokens, now)
            settled(index, text, num_tokens, now)

        return Say(say, both, self.shortcut)


class Tally:
    """Counts what an ask used, piece by piece."""

    def __init__(self, ask: Ask) -> None:
        self._n = ask.n
        self._prompts = ask.prompts
        self._cached: dict[int, int] = {}
        self._num_tokens = 0

    def add(self, piece: Piece) -> None:
        self._num_tokens += piece.num_tokens
        if piece.num_tokens or piece.finish_reason:
            self._cached.setdefault(piece.index, piece.num_cached_tokens)

    def said(self, num_tokens: int) -> None:
        """A choice that has spoken before has gone on."""
        self._num_tokens += num_tokens

    def usage(self) -> Usage:
        # Choices of one prompt find each other's blocks: what the first of them computed was not cached.
        by_prompt: dict[int, int] = {}
        for index, cached in self._cached.items():
            prompt = index // self._n
            by_prompt[prompt] = min(cached, by_prompt.get(prompt, cached))
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=self._num_tokens,
            cached_tokens=sum(by_prompt.values()),
        )


def answer(generate: Generate, ask: Ask, vocabulary: Vocabulary, say: Say | None = None) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices, each choice's in order, without what `say` has taken. Closing it early closes every
    job.

    Raises what `generate` raises; the other choices are closed then.
    """
    if len(ask.jobs) == 1:
        return _told(generate, ask, 0, vocabulary, say)
    return _merged(lambda index, say: _told(generate, ask, index, vocabulary, say), len(ask.jobs), say)


class Heard:
    """An answer that is told whole, while it is said: what the pieces bring, and what goes past them."""

    def __init__(self, ask: Ask) -> None:
        self._tally, self._by_choice = Tally(ask), [list[Piece]() for _ in ask.jobs]
        self._shortcut: Shortcut | None = None

    def speaker(self, pace: Pacing) -> Say:
        if len(self._by_choice) == 1:
            self._shortcut = Shortcut(pace)
        return Say(self._say, self._note, self._shortcut)

    async def all(self, pieces: AsyncGenerator[Piece, None]) -> tuple[list[Piece], Usage]:
        """All choices in order, each as one piece, and what they used."""
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._tally.add(piece)
                    self._by_choice[piece.index].append(piece)
        finally:
            if self._shortcut is not None:
                self._shortcut.end()
        return [_joined(index, parts) for index, parts in enumerate(self._by_choice)], self._tally.usage()

    def _say(self, index: int, text: str, num_tokens: int, now: float) -> bool:
        self._note(index, text, num_tokens, now)
        return True

    def _note(self, index: int, text: str, num_tokens: int, now: float) -> None:
        self._tally.said(num_tokens)
        self._by_choice[index].append(Piece(index=index, text=text, num_tokens=num_tokens))


async def collect(pieces: AsyncGenerator[Piece, None], ask: Ask) -> tuple[list[Piece], Usage]:
    """All choices in order, each as one piece, and what they used."""
    return await Heard(ask).all(pieces)


def _joined(index: int, parts: Sequence[Piece]) -> Piece:
    return Piece(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        text_offsets=tuple(chain.from_iterable(part.text_offsets for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish_reason=parts[-1].finish_reason,
        num_tokens=sum(part.num_tokens for part in parts),
    )


async def _told(
    generate: Generate, ask: Ask, index: int, vocabulary: Vocabulary, say: Say | None
) -> AsyncGenerator[Piece, None]:
    writer = Writer(ask, index, vocabulary)
    async with aclosing(generate(ask.jobs[index], None if say is None else writer.tap(say))) as deltas:
        async for delta in deltas:
            piece = writer.write(delta)
            yield piece
            if piece.finish_reason is not None:
                return


async def _merged(
    tell: Callable[[int, Say | None], AsyncGenerator[Piece, None]], count: int, say: Say | None
) -> AsyncGenerator[Piece, None]:
    arrived: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()
    waits = False  # for what comes: everything before it has been taken

    def through(index: int, text: str, num_tokens: int, now: float) -> bool:
        return say is not None and waits and arrived.empty() and say.say(index, text, num_tokens, now)

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                arrived.put_nowait(piece)

    # No short cut: it would know nothing of what another choice has said before.
    streams = [tell(index, None if say is None else Say(through, say.note)) for index in range(count)]
    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        running = len(tasks)
        while running:
            waits = True
            item = await arrived.get()
            waits = False
            if isinstance(item, Piece):
                yield item
            else:
                item.result()
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Writer:
    """Writes one choice: its tokens to text, up to the first stop string."""

    def __init__(self, ask: Ask, index: int, vocabulary: Vocabulary) -> None:
        self._ask = ask
        self._index = index
        self._vocabulary = vocabulary
        self._min_tokens = ask.jobs[index].sampling.min_tokens
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=ask.skip_special_tokens)
        self._stops = StopStrings(ask.stop, include=ask.include_stop_str_in_output)
        self._num_tokens = 0

    def tap(self, say: Say) -> Tap:
        """Has `say` take tokens whose text needs no more than a look, one at a time."""
        detokenizer, stops, index, silent = self._detokenizer, self._stops, self._index, self._ask.silent
        words = self._vocabulary.words(skip_special_tokens=self._ask.skip_special_tokens)
        if say.shortcut is not None and words is not None:
            say.shortcut.speak(words, self._ask.stop)

        def take(token_ids: Sequence[int], now: float) -> bool:
            if silent or len(token_ids) != 1:
                return False
            text = detokenizer.peek(token_ids[0])
            if text is None or not stops.pass_by(text) or not say.say(index, text, 1, now):
                return False
            self._num_tokens += 1
            detokenizer.num_chars += len(text)
            return True

        def note(token_ids: Sequence[int], now: float) -> None:
            assert words is not None, "without words no short cut takes any"
            text = words.text(token_ids)
            self._num_tokens += len(token_ids)
            detokenizer.num_chars += len(text)
            say.note(index, text, len(token_ids), now)

        return Tap(take, note, say.shortcut)

    def write(self, delta: TokenDelta) -> Piece:
        """The piece for a delta; tokens behind a stop string are left out, as if they had never been made."""
        text: list[str] = []
        offsets: list[int] = []
        for token_id in delta.token_ids:
            offsets.append(self._detokenizer.num_chars)
            self._num_tokens += 1
            is_last = delta.finish_reason is FinishReason.STOP and len(offsets) == len(delta.token_ids)
            text.append(self._shown(token_id, is_last))
            if self._stops.found is not None:
                break
        finish = FinishReason.STOP if self._stops.found is not None else delta.finish_reason
        if finish is not None:
            text.append(self._stops.flush())
        count = len(offsets)
        shown = 0 if self._ask.silent else count
        return Piece(
            index=self._index,
            text="" if self._ask.silent else "".join(text),
            token_ids=delta.token_ids[:shown],
            logprobs=delta.logprobs[:shown],
            text_offsets=tuple(offsets[:shown]),
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=FinishReason.LENGTH if finish and self._ask.silent else finish,
            num_tokens=shown,
            num_cached_tokens=delta.num_cached_tokens,
            queue_s=delta.queue_s,
            num_prompt_computed=delta.num_prompt_computed,
        )

    def _shown(self, token_id: int, is_last: bool) -> str:
        """The text that may be shown once this token is known."""
        ends_answer = is_last and token_id in self._ask.stop_token_ids
        if ends_answer and not self._ask.include_stop_str_in_output:
            return ""
        text = self._detokenizer.feed(token_id)
        # A stop string counts from the token after `min_tokens` on, as a stop token does.
        return text if self._num_tokens <= self._min_tokens else self._stops.feed(text)
