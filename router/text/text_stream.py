"""Runs the jobs of a request and turns their tokens to text: the one way for chat, completions and gRPC.

TextRequest ──jobs──▶ Generate, one each ──TokenDelta──▶ ChoiceText ──TextDelta──▶ merged

ChoiceText: tokens ─detokenise─▶ text ─▶ reasoning | answer ─▶ calls | text ─▶ up to the first stop string
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from protos.codec import Value
from protos.errors import Unavailable
from protos.values import FinishReason, Logprobs
from router.jobs import Generate, TokenDelta
from router.streaming.token_sink import TokenSink
from router.text.detokenizer import Detokenizer
from router.text.reasoning import ReasoningReader
from router.text.sampling_request import TextRequest
from router.text.stop_strings import StopStrings
from router.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from router.text.tools.calls import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The part that one delta added to choice `index`. `text_offsets`: where in the choice's text each token begins.

    `num_tokens` counts the tokens made, shown or not; the choice's sink already sent `num_taken` of them.
    `reasoning` comes before the text, and `num_reasoning` of the tokens are its. Of a request with tools `parts` are
    the text and the calls, in their order.
    `finish_reason` ends the choice, and `stop_string` is the one that did, if any. `num_prompt_computed`,
    `embedding`, `num_predicted` and `num_mispredicted`: as in `TokenDelta`.
    """

    index: int
    text: str = ""
    parts: tuple[Part, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_taken: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    num_prompt_computed: int = 0
    stop_string: str | None = None
    reasoning: str = ""
    num_reasoning: int = 0
    embedding: bytes = b""
    num_predicted: int = 0
    num_mispredicted: int = 0


class Usage(Value, frozen=True, kw_only=True):
    """`cached_tokens`: prompt tokens that no worker computed for any choice. `completion_tokens` include
    `reasoning_tokens` and accepted tokens of a prediction."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)


class UsageCounter:
    def __init__(self, ask: TextRequest) -> None:
        self._n = ask.n
        self._prompts = ask.prompts
        self._cached: dict[int, int] = {}
        self.num_tokens = 0
        self._num_reasoning = 0
        self._num_predicted = 0
        self._num_mispredicted = 0

    def add(self, piece: TextDelta) -> None:
        self.num_tokens += piece.num_tokens
        self._num_reasoning += piece.num_reasoning
        self._num_predicted += piece.num_predicted
        self._num_mispredicted += piece.num_mispredicted
        if piece.num_tokens or piece.finish_reason:
            self._cached.setdefault(piece.index, piece.num_cached_tokens)

    def usage(self) -> Usage:
        # Choices of one prompt find each other's blocks: what the first of them computed was not cached.
        by_prompt: dict[int, int] = {}
        for index, cached in self._cached.items():
            prompt = index // self._n
            by_prompt[prompt] = min(cached, by_prompt.get(prompt, cached))
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=self.num_tokens,
            cached_tokens=sum(by_prompt.values()),
            reasoning_tokens=self._num_reasoning,
            accepted_prediction_tokens=self._num_predicted,
            rejected_prediction_tokens=self._num_mispredicted,
        )


MAX_WAITING = 256
"""Choices of one request that wait for their first token at a time: a long list does not fill the queue."""


def answer(
    generate: Generate,
    ask: TextRequest,
    vocabulary: Vocabulary,
    sinks: Sequence[TokenSink] = (),
    max_waiting: int = MAX_WAITING,
) -> AsyncGenerator[TextDelta, None]:
    """Yields the pieces of all choices, each choice's in order. A choice's pieces count what its sink has written,
    without its text. Closing it early closes every job. Raises what `generate` raises, after closing the other
    choices."""
    if len(ask.jobs) == 1:
        return _text_deltas(generate, ask, 0, vocabulary, sinks[0] if sinks else None)
    streams = [
        _text_deltas(generate, ask, index, vocabulary, sinks[index] if sinks else None)
        for index in range(len(ask.jobs))
    ]
    return _merged(streams, sinks, asyncio.Semaphore(max_waiting))


async def collect(pieces: AsyncGenerator[TextDelta, None], ask: TextRequest) -> tuple[list[TextDelta], Usage]:
    tally, by_choice = UsageCounter(ask), [list[TextDelta]() for _ in ask.jobs]
    async with aclosing(pieces):
        async for piece in pieces:
            tally.add(piece)
            by_choice[piece.index].append(piece)
    return [_joined(index, parts) for index, parts in enumerate(by_choice)], tally.usage()


def _joined(index: int, parts: Sequence[TextDelta]) -> TextDelta:
    return TextDelta(
        index=index,
        text="".join(part.text for part in parts),
        parts=tuple(chain.from_iterable(part.parts for part in parts)),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        text_offsets=tuple(chain.from_iterable(part.text_offsets for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish_reason=parts[-1].finish_reason,
        num_tokens=sum(part.num_tokens for part in parts),
        stop_string=parts[-1].stop_string,
        reasoning="".join(part.reasoning for part in parts),
        num_reasoning=sum(part.num_reasoning for part in parts),
        embedding=parts[-1].embedding,
    )


async def _text_deltas(
    generate: Generate, ask: TextRequest, index: int, vocabulary: Vocabulary, sink: TokenSink | None
) -> AsyncGenerator[TextDelta, None]:
    writer = ChoiceText(ask, index, vocabulary, sink)
    job = ask.jobs[index]
    job.client.sink = sink
    deltas = generate(job)
    try:
        async for delta in deltas:
            piece = writer.write(delta)
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        await deltas.aclose()
        job.client.sink = None  # else the answer leaves a reference cycle


async def _merged(
    streams: Sequence[AsyncGenerator[TextDelta, None]], sinks: Sequence[TokenSink], waiting: asyncio.Semaphore
) -> AsyncGenerator[TextDelta, None]:
    arrived: asyncio.Queue[TextDelta | asyncio.Task[None]] = asyncio.Queue()

    def put(piece: TextDelta) -> None:
        if sinks:
            sinks[piece.index].enqueue()
        arrived.put_nowait(piece)

    async def pump(stream: AsyncGenerator[TextDelta, None]) -> None:
        async with aclosing(stream) as pieces:
            async with waiting:
                first = await anext(pieces, None)
            if first is not None:
                put(first)
            async for piece in pieces:
                put(piece)

    clock = asyncio.get_running_loop().time
    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, TextDelta):
                yield item
                if sinks:
                    sinks[item.index].dequeue(clock())
            else:
                item.result()
                running -= 1
    except asyncio.CancelledError:
        await _ended(tasks)
        while not arrived.empty():  # tokens that sinks have taken are accounted for
            if isinstance(item := arrived.get_nowait(), TextDelta):
                yield item
        raise
    finally:
        await _ended(tasks)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ChoiceText:
    """Turns one choice's tokens to text, up to the first stop string outside of reasoning and calls. The beginning of a
    call ends the reasoning."""

    def __init__(self, ask: TextRequest, index: int, vocabulary: Vocabulary, sink: TokenSink | None = None) -> None:
        self._ask = ask
        self._index = index
        self._sink = sink
        sampling = ask.jobs[index].sampling
        self._min_tokens = sampling.min_tokens
        self._is_vector = bool(sampling.pooling)
        self._has_labels = bool(sampling.label_token_ids)
        self._detokenizer = Detokenizer(
            vocabulary, skip_special_tokens=ask.skip_special_tokens, visible=ask.visible_tokens
        )
        self._stops = StopStrings(ask.stop, include=ask.include_stop_str_in_output)
        self._num_tokens = 0
        self._reader = ask.reasoning.reader() if ask.reasoning is not None else None
        self._calls = ask.new_calls() if ask.new_calls is not None else None
        self._is_thinking = self._reader is not None and self._calls is not None
        self._has_called_inside = False  # the reasoning
        self._thoughts: list[Part] = []
        self._num_reasoning = 0

    def write(self, delta: TokenDelta) -> TextDelta:
        """The piece for a delta; tokens after a stop string are dropped and not counted. Raises Unavailable."""
        parts: list[Part] = []
        offsets: list[int] = []
        sink = self._sink
        num_taken = sink.num_taken_of(len(delta.token_ids)) if sink is not None else 0
        num_written = num_taken if sink is not None and sink.writes else 0
        self._num_tokens += num_written
        reader = self._reader
        if self._is_inside:
            self._num_reasoning += num_written
        for token_id in delta.token_ids[num_written:]:
            offsets.append(self._detokenizer.num_chars)
            self._num_tokens += 1
            is_last = delta.finish_reason is FinishReason.STOP and num_written + len(offsets) == len(delta.token_ids)
            parts += self._shown(token_id, is_last)
            if self._stops.found is not None:
                break
        finish = FinishReason.STOP if self._stops.found is not None else delta.finish_reason
        if finish is not None:
            if self._is_vector and not delta.embedding:
                raise Unavailable("The worker sent no vector: it is of an older version of Baton")
            if self._stops.found is None:
                rest = self._answer_of(reader.end()) if reader is not None else []
                parts += self._stopped([*rest, *self._last(is_whole=finish is FinishReason.STOP)])
            parts.append(self._stops.flush())
        if sink is not None:
            sink.is_clear = self._detokenizer.is_clear and self._stops.is_clear
            if reader is not None:
                self._turn(sink, reader)
        thoughts, num_reasoning = self._take_thoughts() if reader is not None else ("", 0)
        count = num_written + len(offsets)
        shown = 0 if self._ask.silent else count
        text = "" if self._ask.silent else "".join([part for part in parts if isinstance(part, str)])
        return TextDelta(
            index=self._index,
            text=text,
            parts=tuple(parts) if self._calls is not None else (),
            token_ids=delta.token_ids[:shown],
            logprobs=delta.logprobs[: count if self._has_labels else shown],
            text_offsets=tuple(offsets[:shown]),
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=FinishReason.LENGTH if finish and self._ask.silent else finish,
            num_tokens=shown,
            num_taken=num_taken,
            num_cached_tokens=delta.num_cached_tokens,
            queue_s=delta.queue_s,
            num_prompt_computed=delta.num_prompt_computed,
            stop_string=self._stops.found,
            reasoning="" if self._ask.silent else thoughts,
            num_reasoning=num_reasoning,
            embedding=delta.embedding,
            num_predicted=min(delta.num_predicted, shown),
            num_mispredicted=delta.num_mispredicted,
        )

    @property
    def _is_inside(self) -> bool:
        return self._reader is not None and self._reader.is_inside and not self._has_called_inside

    def _shown(self, token_id: int, is_last: bool) -> Sequence[Part]:
        ends_answer = is_last and token_id in self._ask.stop_token_ids
        if ends_answer and not self._ask.include_stop_str_in_output:
            return ()
        text, was_inside = self._detokenizer.feed(token_id), self._is_inside
        parts = self._answer_of(self._reader.feed(token_id, text) if self._reader is not None else ("", text))
        self._num_reasoning += was_inside and self._is_inside
        # A stop string counts from the token after `min_tokens` on, as a stop token does.
        return parts if self._num_tokens <= self._min_tokens else self._stopped(parts)

    def _answer_of(self, read: tuple[str, str]) -> Sequence[Part]:
        thoughts, text = read
        if self._calls is None:
            self._thoughts += [thoughts] if thoughts else []
            return [text] if text else []
        if self._has_called_inside:
            return self._calls.feed(thoughts + text)
        parts: Sequence[Part] = ()
        if thoughts and self._is_thinking:
            parts = self._outside(self._calls.feed(thoughts))
        elif thoughts:
            self._thoughts.append(thoughts)
        if text and self._is_thinking and self._ask.new_calls is not None:
            self._outside(self._calls.end())
            self._calls, self._is_thinking = self._ask.new_calls(), False
        return [*parts, *self._calls.feed(text)] if text else parts

    def _outside(self, parts: Sequence[Part]) -> Sequence[Part]:
        num_thoughts = next((i for i, part in enumerate(parts) if not isinstance(part, str)), len(parts))
        self._thoughts += parts[:num_thoughts]
        self._has_called_inside = num_thoughts < len(parts)
        self._is_thinking = not self._has_called_inside
        return parts[num_thoughts:]

    def _last(self, *, is_whole: bool) -> Sequence[Part]:
        parts = self._calls.end(is_whole=is_whole) if self._calls is not None else ()
        return self._outside(parts) if self._is_thinking else parts

    def _stopped(self, parts: Sequence[Part]) -> Sequence[Part]:
        shown: list[Part] = []
        for part in parts:
            if self._stops.found is None:
                shown += [self._stops.feed(part)] if isinstance(part, str) else [self._stops.flush(), part]
        return shown

    def _take_thoughts(self) -> tuple[str, int]:
        assert self._ask.reasoning is not None
        thoughts = "".join(map(str, self._thoughts)) if self._ask.reasoning.is_shown else ""
        self._thoughts.clear()
        num, self._num_reasoning = self._num_reasoning, 0
        return thoughts, num

    def _turn(self, sink: TokenSink, reader: ReasoningReader) -> None:
        assert self._ask.reasoning is not None
        is_hidden = reader.is_inside and not self._ask.reasoning.is_shown
        sink.is_clear = sink.is_clear and reader.is_clear and not is_hidden
        if sink.is_clear:
            sink.turn(is_reasoning=reader.is_inside)
