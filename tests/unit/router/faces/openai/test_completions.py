"""The `openai` client's completions, against a live server: prompts of every shape, echo, logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from protos.values import WorkerRole
from router.jobs import Job, TokenDelta
from tests.unit.cluster.cli.test_status_verb import info
from tests.unit.router.scripted import (
    Crew,
    Family,
    Worker,
    byte_level,
    ids_of,
    saying,
    sentencepiece,
    talking,
    token_deltas,
)


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    body: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 50} | options
    return await client.completions.create(**body)


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    return [chunk async for chunk in await ask(client, stream=True, **options)]


async def test_a_prompt_is_continued() -> None:
    async with talking(of=" world 🙂") as (client, generate):
        reply = await ask(client, user="me")
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (" world 🙂", "stop", 0, None)
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.created, reply.model) == ("text_completion", 1_700_000_000, "tiny")
    assert list(generate.jobs[0].prompt_ids) == ids_of("<|bos|>hello"), "the tokenizer's start token is added"
    assert reply.usage.prompt_tokens == len(generate.jobs[0].prompt_ids)


async def test_sixteen_tokens_are_the_default() -> None:
    async with talking(saying("the quick brown fox jumps over the lazy dog " * 5)) as (client, generate):
        reply: Any = await client.completions.create(model="tiny", prompt="hello")
    assert generate.jobs[0].sampling.max_tokens == 16
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (16, "length")


async def test_a_stream_says_the_same() -> None:
    async with talking(of=" world 🙂") as (client, _):
        whole = await ask(client)
        *chunks, last = await streamed(client, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert (last.choices, last.usage) == ([], whole.usage)


async def test_usage_is_in_every_chunk_when_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with talking(of=" world 🙂") as (client, _):
        *chunks, last = await streamed(client, stream_options=options)
    num_tokens = last.usage.completion_tokens
    assert [chunk.usage.completion_tokens for chunk in chunks] == list(range(1, num_tokens + 1))
    assert {chunk.usage.prompt_tokens for chunk in (*chunks, last)} == {last.usage.prompt_tokens}
    assert last.choices == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", ["<|bos|>hello"]),
        (["hello", "world"], ["<|bos|>hello", "<|bos|>world"]),
        (ids_of("hello"), ["hello"]),
        ([ids_of("hello"), ids_of("world")], ["hello", "world"]),
    ],
)
async def test_prompts_come_in_four_shapes(prompt: Any, expected: list[str]) -> None:
    async with talking(of=" world 🙂") as (client, generate):
        reply = await ask(client, prompt=prompt)
    assert [byte_level().decode(job.prompt_ids) for job in generate.jobs] == expected
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_times_choices_are_numbered_prompt_by_prompt(stream: bool) -> None:
    def script(job: Job) -> list[Any]:
        return token_deltas(ids_of(f" {byte_level().decode(job.prompt_ids[1:])} {job.request_id[-1]}"), job)

    async with talking(script) as (client, _):
        texts = dict.fromkeys(range(4), "")
        if stream:
            for chunk in await streamed(client, prompt=["a", "b"], n=2, best_of=2):
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = {choice.index: choice.text for choice in (await ask(client, prompt=["a", "b"], n=2)).choices}
    assert texts == {0: " a 0", 1: " a 1", 2: " b 2", 3: " b 3"}


@pytest.mark.parametrize("worst", [-3.0, None])
async def test_of_best_of_the_likeliest_are_told(worst: float | None) -> None:
    def script(job: Job) -> list[Any]:
        place = int(job.request_id[-1])
        said = token_deltas(ids_of(f" {byte_level().decode(job.prompt_ids[1:])} {place}" + "." * place), job)
        likely = [worst, -1.0, -2.0][place % 3]
        if likely is None:
            return [replace(delta, logprobs=()) for delta in said]
        score: dict[str, Any] = {"logprob": likely}
        return [
            replace(
                output, logprobs=tuple(replace(each, chosen=replace(each.chosen, **score)) for each in output.logprobs)
            )
            for output in said
        ]

    async with talking(script) as (client, generate):
        reply = await ask(client, prompt=["a", "b"], n=2, best_of=3, max_tokens=30)
    texts = {choice.index: choice.text for choice in reply.choices}
    assert texts == {0: " a 1.", 1: " a 2..", 2: " b 4....", 3: " b 5....."}
    assert {choice.logprobs for choice in reply.choices} == {None}
    assert len(generate.jobs) == 6
    assert reply.usage.completion_tokens > sum(map(len, texts.values())), "those that are not told were made as well"


async def test_logprobs_stand_in_columns() -> None:
    async with talking(saying(" a 🦊")) as (client, _):
        columns = (await ask(client, logprobs=1)).choices[0].logprobs
        none = (await ask(client, logprobs=0)).choices[0].logprobs
    said = [*ids_of(" a 🦊"), *ids_of("<|end|>")]
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == len(said)
    assert columns.token_logprobs == [-1.5] * len(said)
    assert set(columns.top_logprobs[0].values()) == {-0.5, -1.5}, "the best one, and the chosen one"
    assert columns.tokens[-1] == "<|end|>"
    assert columns.tokens[-2].startswith("bytes:\\x"), "part of a character is told as bytes"
    assert columns.text_offset[0] == 0
    assert columns.text_offset[-1] == len(" a 🦊")
    assert none.top_logprobs is None
    assert none.token_logprobs == columns.token_logprobs


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("family", [byte_level, sentencepiece])
async def test_an_echo_repeats_the_prompt_with_its_logprobs(stream: bool, family: Family) -> None:
    tokenizer = family()
    async with talking(saying("the", tokenizer), tokenizer=tokenizer) as (client, generate):
        if stream:
            choices = [chunk.choices[0] for chunk in await streamed(client, echo=True, logprobs=2)]
        else:
            choices = (await ask(client, echo=True, logprobs=2)).choices
    text = "".join(choice.text for choice in choices)
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for name, column in columns.items():
        for chunk in choices:
            column.extend(getattr(chunk.logprobs, name))
    num_prompt = len(generate.jobs[0].prompt_ids)
    assert text.startswith("hello")
    assert text.strip().endswith("the")
    assert columns["token_logprobs"][:2] == [None, -1.5]
    assert columns["text_offset"][0] == columns["text_offset"][1] == 0, "the start token has no width"
    assert columns["text_offset"][num_prompt] == len("hello")
    for token, at in list(zip(columns["tokens"], columns["text_offset"], strict=True))[2:-1]:
        assert text.startswith(token, at)


async def test_an_echo_of_token_ids_is_their_text() -> None:
    async with talking(of=" world 🙂") as (client, _):
        reply = await ask(client, prompt=ids_of("<|bos|>hello"), echo=True)
    assert reply.choices[0].text == "<|bos|>hello world 🙂"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_alone_scores_a_text(stream: bool) -> None:
    options = {"echo": True, "max_tokens": 0, "logprobs": 1}
    async with talking(of=" world 🙂") as (client, generate):
        if stream:
            [choice] = (await streamed(client, **options))[0].choices
        else:
            reply = await ask(client, **options)
            [choice] = reply.choices
            assert reply.usage.completion_tokens == 0
    assert choice.text == "hello"
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.tokens) == len(generate.jobs[0].prompt_ids)


async def test_no_tokens_need_an_echo() -> None:
    async with talking() as (client, _):
        with pytest.raises(openai.BadRequestError, match=r"'max_tokens' is 0: .* or 0 with echo = true"):
            await ask(client, max_tokens=0)


async def test_vllms_extras() -> None:
    async with talking(of=" world 🙂") as (client, generate):
        reply = await ask(client, n=2, extra_body={"return_token_ids": True, "prompt_logprobs": 0})
        chunks = await streamed(client, extra_body={"return_token_ids": True})
    prompt = list(generate.jobs[0].prompt_ids)
    said = [*ids_of(" world 🙂"), *ids_of("<|end|>")]
    for choice in reply.choices:
        assert (choice.prompt_token_ids, choice.token_ids) == (prompt, said)
        assert [None if logprob is None else list(logprob) for logprob in choice.prompt_logprobs] == [
            None,
            *([str(token_id)] for token_id in prompt[1:]),
        ]
    assert [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids] == said
    assert chunks[0].choices[0].prompt_token_ids == prompt


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"suffix": "x"}, "'suffix'"),
        ({"extra_body": {"response_format": {}}}, "'response_format'.*Completions take 'structured_outputs'"),
        ({"best_of": 2, "n": 3}, "it must be at least n"),
        ({"logprobs": 30}, "between 0 and 20"),
        ({"prompt": [999]}, "'prompt' has the value 999"),
        ({"prompt": []}, "'prompt' is an empty list: give at least one prompt"),
        ({"prompt": [[]]}, "'prompt' is empty"),
        ({"prompt": ["x"] * 2100}, "at most 2048"),
        ({"prompt": "word " * 500}, "maximum context length is 256"),
        ({"prompt": "x" * 1_000_000}, "maximum context length is 256"),
        ({"max_tokens": 10**9}, "maximum context length is 256"),
        ({"max_tokens": 10**12}, "it must be between 1 and"),
    ],
)
async def test_the_clients_mistakes(options: dict[str, Any], told: str) -> None:
    async with talking(of=" world 🙂") as (client, generate):
        with pytest.raises(openai.BadRequestError, match=told):
            await ask(client, **options)
    assert not generate.jobs


async def test_the_same_seed_asks_for_the_same_numbers() -> None:
    async with talking(of=" world 🙂") as (client, generate):
        for seed in (7, 7, 8):
            await ask(client, seed=seed)
    assert [job.sampling.seed for job in generate.jobs] == [7, 7, 8]


async def test_a_model_has_the_encoding_that_its_workers_report() -> None:
    decode = replace(info("decode-0", WorkerRole.DECODE), weights="gptq-int4-g128, 4.16 bits a weight")
    async with talking(of="", fleet=Crew(Worker(), Worker(info=decode))) as (client, _):
        model: Any = await client.models.retrieve("tiny")
        assert model.weights == "gptq-int4-g128, 4.16 bits a weight"


async def test_the_fingerprint_depends_on_weight_and_kv_types() -> None:
    """`--quantize` and `--kv-dtype` change answers, and left it as it was."""
    fleet, fingerprints = Crew(), []
    async with talking(fleet=fleet) as (client, _):
        for fleet.stored in ("BF16, 16 bits a weight; KV bfloat16", "BF16, 16 bits a weight; KV int8", "rounded-int4"):
            fingerprints += [(await ask(client)).system_fingerprint for _ in range(2)]
    assert fingerprints[::2] == fingerprints[1::2]
    assert len(set(fingerprints)) == 3


async def test_models_are_listed() -> None:
    async with talking(of=" world 🙂") as (client, _):
        model: Any = (await client.models.list()).data[0]
        assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "baton", 256)
        assert model.weights is None, "no worker has reported its own yet"
        assert await client.models.retrieve("tiny") == model
        with pytest.raises(openai.NotFoundError, match="a/b"):
            await client.models.retrieve("a/b")


async def test_aliases_that_are_names_are_listed() -> None:
    async with talking(model_aliases=("gpt-4o", "claude-*")) as (client, _):
        assert [model.id for model in (await client.models.list()).data] == ["tiny", "gpt-4o"]
        assert (await client.models.retrieve("claude-opus")).id == "claude-opus"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_lm_evals_requests_score_every_token_of_a_text(max_tokens: int) -> None:
    """Token ids of context and continuation; it reads logprobs and whether each token is the likeliest."""
    prompts = [ids_of("<|bos|>hello world"), ids_of("<|bos|>the fox jumps")]
    asked = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1}
    asked |= {"seed": 1234, "echo": True}
    async with talking(of=" x") as (client, _):
        reply: Any = await client.post("/completions", body=asked, cast_to=object)
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        columns = choice["logprobs"]
        lengths = {len(columns[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
        assert lengths == {len(prompt) + max_tokens}
        assert columns["token_logprobs"][0] is None
        for logprob, top in list(zip(columns["token_logprobs"], columns["top_logprobs"], strict=True))[1 : len(prompt)]:
            assert logprob <= max(top.values())


async def test_a_worker_that_sends_no_logprobs_leaves_them_null() -> None:
    def silent(job: Job) -> list[TokenDelta]:
        return token_deltas(ids_of("hello"), replace(job, sampling=replace(job.sampling, logprobs=None)))

    async with talking(silent) as (client, _):
        told = (await ask(client, logprobs=1)).choices[0].logprobs
    assert told.tokens
    assert told.token_logprobs == told.top_logprobs == [None] * len(told.tokens)
