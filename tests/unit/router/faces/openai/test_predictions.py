"""`speculation` and `prediction` of chats and completions: what workers get, what usage reports, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from protos.values import SPECULATION_SOURCES, SpeculationParams
from router.jobs import Job, TokenDelta
from tests.unit.router.scripted import Scripted, ids_of, saying, talking
from tests.unit.router.text.test_text_stream import asking, told
from workers.speculation import registry

TEXT = "the quick brown fox"
PREDICTION = {"type": "content", "content": TEXT}


def as_predicted(job: Job) -> list[Any]:
    """The second of three deltas accepted two drafts of a prediction, the last rejected one."""
    deltas: list[Any] = [*saying(TEXT, at_once=3)(job)]
    deltas[1] = replace(deltas[1], num_predicted=2)
    deltas[-1] = replace(deltas[-1], num_mispredicted=1)
    return deltas


async def usage_of(client: openai.AsyncOpenAI, *, chat: bool, stream: bool) -> Any:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "extra_body": {"prediction": PREDICTION}}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        reply: Any = await client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], **body)
    else:
        reply = await client.completions.create(prompt="hello", **body)
    if not stream:
        return reply.usage
    return [chunk async for chunk in reply][-1].usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_prediction_reaches_the_workers_and_is_counted(*, chat: bool, stream: bool) -> None:
    async with talking(as_predicted) as (client, generate):
        usage = await usage_of(client, chat=chat, stream=stream)
    assert generate.jobs[0].sampling.speculation == SpeculationParams(prediction_ids=tuple(ids_of(TEXT)))
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 1)


async def test_drafts_behind_a_stop_string_are_not_counted_as_accepted() -> None:
    def script(job: Job) -> list[TokenDelta]:
        [delta] = saying(TEXT, at_once=50)(job)
        assert isinstance(delta, TokenDelta)
        return [replace(delta, num_predicted=len(delta.token_ids) - 1)]

    [choice], usage = await told(Scripted(script), asking(stop=("ick",)))
    assert usage.accepted_prediction_tokens == len(choice.token_ids) < len(ids_of(TEXT))


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"enabled": False}, SpeculationParams(mode="off")),
        ({"enabled": True}, SpeculationParams()),
        ({"sources": ["suffix", "ngram"]}, SpeculationParams(sources=("suffix", "ngram"))),
        ({"max_drafts": 32}, SpeculationParams(max_drafts=32)),
        ({}, SpeculationParams()),
    ],
)
async def test_a_request_says_how_it_speculates(given: dict[str, Any], params: SpeculationParams) -> None:
    async with talking() as (client, generate):
        await client.completions.create(model="tiny", prompt="a", extra_body={"speculation": given})
    assert generate.jobs[0].sampling.speculation == params


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"speculation": {"sources": ["oracle"]}}, "speculation.sources[0]", "ngram"),
        ({"speculation": {"sources": []}}, "speculation.sources", "at least one of ngram"),
        ({"speculation": {"max_drafts": 0}}, "speculation.max_drafts", "between 1 and 32"),
        ({"speculation": {"max_drafts": 33}}, "speculation.max_drafts", "between 1 and 32"),
        ({"speculation": {"max_drafts": -1}}, "speculation.max_drafts", "between 1 and 32"),
        ({"speculation": "off"}, "speculation", "an object"),
        ({"speculation": {"k": 4}}, "speculation.k", "k"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "content"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content", "a string"),
        ({"prediction": {"type": "content", "content": "word " * 300}}, "prediction", "at most 256"),
        ({"prediction": {"type": "content", "content": "word" * 10**6}}, "prediction", "at most 256"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
async def test_a_wrong_value_is_named(given: dict[str, Any], param: str, message: str, *, chat: bool) -> None:
    async with talking() as (client, generate):
        ask: Any = client.chat.completions.create if chat else client.completions.create
        prompt: Any = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(model="tiny", **prompt, extra_body=given)
    assert refused.value.param == param
    assert message in refused.value.message
    assert not generate.jobs


async def test_a_prediction_may_be_parts_of_text() -> None:
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": " brown fox"}]
    async with talking() as (client, generate):
        body = {"prediction": {"type": "content", "content": parts}}
        await client.completions.create(model="tiny", prompt="a", n=2, extra_body=body)
    assert [job.sampling.speculation.prediction_ids for job in generate.jobs] == [tuple(ids_of(TEXT))] * 2


def test_every_source_that_workers_know_can_be_named() -> None:
    assert {*registry.MODES, *registry.BY_A_MODEL} - {"off", "auto"} <= {*SPECULATION_SOURCES}
