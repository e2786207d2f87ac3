"""Jobs become text: merged as it comes, ended by stop strings, closed when nobody listens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from protos.errors import WorkerLost
from protos.values import FinishReason
from router.jobs import Job, TokenDelta
from router.text.model_card import ModelCard
from router.text.sampling_request import SamplingRequest, TextRequest, make_text_request
from router.text.text_stream import TextDelta, Usage, UsageCounter, answer, collect
from tests.unit.router.scripted import Scripted, byte_level, ids_of, saying, token_deltas, tokenizer_end

END = tokenizer_end(byte_level())
CARD = ModelCard(name="m", max_model_len=1000, vocab_size=512, eos_token_ids=frozenset({END}))


def asking(num_prompts: int = 1, **asked: Any) -> TextRequest:
    fields = {"max_tokens": 100} | asked
    return make_text_request(SamplingRequest(**fields), [(1, 2, 3, 4)] * num_prompts, CARD, request_id="r")


async def told(generate: Scripted, ask: TextRequest) -> tuple[list[TextDelta], Usage]:
    return await collect(answer(generate, ask, byte_level().vocabulary), ask)


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_tokens_become_text(at_once: int) -> None:
    [choice], usage = await told(Scripted(saying("naïve café 你好 🙂", at_once=at_once)), asking())
    assert choice.text == "naïve café 你好 🙂"
    assert choice.finish_reason is FinishReason.STOP
    assert choice.token_ids == (*ids_of("naïve café 你好 🙂"), END)
    assert usage == Usage(prompt_tokens=4, completion_tokens=len(choice.token_ids), cached_tokens=2)


async def test_a_limit_ends_with_length() -> None:
    [choice], usage = await told(Scripted(saying("the quick brown fox")), asking(max_tokens=2))
    assert choice.finish_reason is FinishReason.LENGTH
    assert usage.completion_tokens == 2


@pytest.mark.parametrize("at_once", [1, 4, 50])
async def test_a_stop_string_ends_the_choice_and_the_job(at_once: int) -> None:
    generate = Scripted(saying("the quick brown fox jumps over the lazy dog", at_once=at_once))
    [choice], usage = await told(generate, asking(stop=("x jum",)))
    assert choice.text == "the quick brown fo"
    assert choice.finish_reason is FinishReason.STOP
    assert generate.closed == ["r-0"]
    assert byte_level().decode(choice.token_ids).startswith("the quick brown fox jum")
    assert usage.completion_tokens == len(choice.token_ids) < len(ids_of("the quick brown fox jumps over"))


async def test_a_stop_string_is_kept_on_demand() -> None:
    ask = asking(stop=("brown",), include_stop_str_in_output=True)
    [choice], _ = await told(Scripted(saying("the quick brown fox")), ask)
    assert choice.text == "the quick brown"


async def test_held_back_text_is_released_at_the_end() -> None:
    [choice], _ = await told(Scripted(saying("the quick bro")), asking(stop=("brown",)))
    assert choice.text == "the quick bro"


async def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    text = "the fox the dog"
    [choice], _ = await told(Scripted(saying(text)), asking(stop=("the",), min_tokens=len(ids_of("the fox"))))
    assert choice.text == "the fox "


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello!")])
async def test_a_stop_token_is_counted_and_not_shown(include: bool, text: str) -> None:
    tokens = [*ids_of("hello"), *ids_of("!")]
    ask = asking(stop_token_ids=(tokens[-1],), include_stop_str_in_output=include)
    [choice], usage = await told(Scripted(lambda job: token_deltas(tokens, job)), ask)
    assert choice.text == text
    assert usage.completion_tokens == len(tokens)


async def test_the_end_token_is_shown_only_if_both_are_asked_for() -> None:
    ask = asking(skip_special_tokens=False, include_stop_str_in_output=True)
    [choice], _ = await told(Scripted(saying("hello")), ask)
    assert choice.text == "hello<|end|>"
    [choice], _ = await told(Scripted(saying("hello")), asking(skip_special_tokens=False))
    assert choice.text == "hello"


async def test_a_silent_ask_shows_nothing() -> None:
    [choice], usage = await told(Scripted(saying("hello")), asking(silent=True, prompt_logprobs=1))
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("", (), FinishReason.LENGTH)
    assert len(choice.prompt_logprobs) == 3
    assert usage.completion_tokens == 0


async def test_choices_come_as_they_are_made() -> None:
    """The first waits; the others are told meanwhile."""
    gate = asyncio.Event()

    def script(job: Job) -> list[Any]:
        waits = [gate] if job.request_id == "r-0" else []
        return [*waits, *token_deltas([*ids_of(f"hello {job.request_id}"), END], job)]

    ask, finished = asking(num_prompts=2, n=2), []
    async with aclosing(answer(Scripted(script), ask, byte_level().vocabulary)) as pieces:
        async for piece in pieces:
            if piece.finish_reason is not None:
                finished.append(piece.index)
            if len(finished) == 3:
                gate.set()
    assert sorted(finished[:3]) == [1, 2, 3]
    assert finished[3] == 0


async def test_every_choice_gets_its_own_text() -> None:
    script = Scripted(lambda job: token_deltas([*ids_of(f"hello {job.request_id}"), END], job))
    choices, usage = await told(script, asking(num_prompts=2, n=2))
    assert [choice.text for choice in choices] == ["hello r-0", "hello r-1", "hello r-2", "hello r-3"]
    assert usage.prompt_tokens == 8, "a prompt counts once, however many choices it has"


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_early_closes_every_job(n: int) -> None:
    generate = Scripted(lambda job: [TokenDelta(token_ids=(300,)), asyncio.Event()])
    pieces = answer(generate, asking(n=n), byte_level().vocabulary)
    await anext(pieces)
    await pieces.aclose()
    assert sorted(generate.closed) == sorted(job.request_id for job in generate.jobs)


async def test_when_one_choice_fails_the_others_are_closed() -> None:
    def script(job: Job) -> list[Any]:
        after = WorkerLost("gone") if job.request_id == "r-1" else asyncio.Event()
        return [TokenDelta(token_ids=(300,)), after]

    generate = Scripted(script)
    with pytest.raises(WorkerLost, match="gone"):
        await told(generate, asking(n=3))
    assert sorted(generate.closed) == ["r-0", "r-1", "r-2"]


def test_cached_tokens_are_uncomputed_ones() -> None:
    """The second choice finds what the first has just computed: the prompt was not cached."""
    tally = UsageCounter(asking(num_prompts=2, n=2))

    def seen(index: int, cached: int) -> None:
        tally.add(TextDelta(index=index, num_tokens=1, num_cached_tokens=cached))

    for index, cached in enumerate([0, 4, 2, 4]):
        seen(index, cached)
    seen(0, 0)
    assert tally.usage() == Usage(prompt_tokens=8, completion_tokens=5, cached_tokens=2)
