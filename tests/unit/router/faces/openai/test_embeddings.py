"""Vectors of prompts through the `openai` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from protos.values import FinishReason
from router.jobs import Job, TokenDelta
from tests.unit.router.fake_cluster import Cluster, job
from tests.unit.router.scripted import ids_of, talking


@pytest.mark.parametrize(
    ("given", "num_prompts"),
    [("hello", 1), (["hello", "the fox"], 2), (ids_of("hello"), 1), ([ids_of("hello"), ids_of("a")], 2)],
)
async def test_each_prompt_has_a_vector_of_length_one(given: Any, num_prompts: int) -> None:
    async with talking() as (client, generate):
        reply = await client.embeddings.create(model="tiny", input=given)
        plain = await client.embeddings.create(model="tiny", input=given, encoding_format="float")
    assert [row.index for row in reply.data] == list(range(num_prompts))
    for item, other in zip(reply.data, plain.data, strict=True):
        assert item.embedding == other.embedding == pytest.approx([0.6, 0.8, *[0.0] * 6])
    num_tokens = sum(len(item.prompt_ids) for item in generate.jobs[:num_prompts])
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)
    assert {item.sampling.pooling for item in generate.jobs} == {"last"}


async def test_as_many_inputs_as_openai_takes_have_a_vector_each() -> None:
    async with talking() as (client, generate):
        reply = await client.embeddings.create(model="tiny", input=["hello"] * 2048)
        assert (len(reply.data), len(generate.jobs)) == (2048, 2048)
        with pytest.raises(openai.BadRequestError, match="'input' has 2049 prompts"):
            await client.embeddings.create(model="tiny", input=["hello"] * 2049)


async def test_a_vector_is_cut_and_pooled_as_asked() -> None:
    async with talking(pooling="mean") as (client, generate):
        cut = await client.embeddings.create(model="tiny", input="hello", dimensions=1, encoding_format="float")
        await client.embeddings.create(model="tiny", input="hello", extra_body={"pooling": "last"})
        assert cut.data[0].embedding == [1.0]
        assert [one.sampling.pooling for one in generate.jobs] == ["mean", "last"]
        for problem, changes in (("dimensions", {"dimensions": 9}), ("input", {"input": []})):
            body: Any = {"model": "tiny", "input": "hello"} | changes
            with pytest.raises(openai.BadRequestError, match=problem):
                await client.embeddings.create(**body)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([5] * 300, "your input resulted in 300 tokens"),
        (["x"] * 2100, "'input' has 2100 prompts: it must have at most"),
    ],
)
async def test_too_long_an_input_is_named(given: Any, problem: str) -> None:
    """Token ids were called messages and text parts."""
    async with talking() as (client, _):
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            await client.embeddings.create(model="tiny", input=given)
        assert refused.value.param == "input"


async def test_a_worker_without_vectors_is_named() -> None:
    def plain(asked: Job) -> list[TokenDelta]:
        return [TokenDelta(token_ids=(5,), finish_reason=FinishReason.LENGTH)]

    async with talking(plain) as (client, _):
        with pytest.raises(openai.InternalServerError, match="older version"):
            await client.embeddings.create(model="tiny", input="hello")


@pytest.mark.parametrize("changes", [{"pooling": "last"}, {"label_token_ids": (5, 6), "logprobs": 0}], ids=str)
async def test_what_a_prompt_alone_answers_needs_no_decode_worker(cluster: Cluster, changes: dict[str, Any]) -> None:
    """The prefill worker answers, and no ticket is reserved."""
    asked = job(max_tokens=1, **changes)
    async for _ in cluster.generate(asked):
        pass
    [request] = cluster["p0"].submitted
    assert (request.sampling, request.ticket) == (asked.sampling, None)
    assert not cluster["d0"].submitted
    [trace] = cluster.router.routing.records.recent(1)
    [(prefill, decode)] = [(one.facts["prefill"], one.facts["decode"]) for one in trace.events if "decode" in one.facts]
    assert (prefill, decode) == ("p0", "")
    assert not cluster["d0"].reserved
