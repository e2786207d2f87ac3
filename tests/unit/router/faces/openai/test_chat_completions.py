"""The `openai` client's chat completions, against a live server: whole and streamed."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from protos.errors import NoWorkers, Overloaded, WorkerLost
from router.jobs import Job, TokenDelta
from router.text.chat_template import ChatTemplate
from tests.unit.router.scripted import ids_of, saying, talking, token_deltas

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**({"model": "tiny", "messages": HELLO} | options))


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    return [chunk async for chunk in await ask(client, stream=True, **options)]


async def test_a_question_gets_an_answer() -> None:
    async with talking() as (client, generate):
        reply = await ask(client)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "naïve café 🙂")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.created, reply.model) == ("chat.completion", 1_700_000_000, "tiny")
    assert reply.system_fingerprint
    prompt = generate.jobs[0].prompt_ids
    assert list(prompt) == ids_of("<|bos|><|user|>user: hello<|end|><|assistant|>")
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(ids_of("naïve café 🙂")) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_chat_may_fill_the_context_with_the_models_defaults() -> None:
    async with talking() as (client, generate):
        await ask(client)
    [job] = generate.jobs
    assert job.sampling.max_tokens == 256 - len(job.prompt_ids)
    assert job.sampling.temperature == 0.7


async def test_options_reach_the_workers() -> None:
    async with talking() as (client, generate):
        await ask(
            client, temperature=0, top_p=0.5, presence_penalty=1, frequency_penalty=-1, seed=-1, n=2, max_tokens=9,
            logit_bias={"300": 5}, extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2,
            "stop_token_ids": [9], "ignore_eos": True, "priority": -4, "cache_salt": "me"},
        )  # fmt: skip
    first, second = generate.jobs
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop_token_ids) == (2, 9, (9,))
    assert (sampling.logit_bias, sampling.ignore_eos) == (((300, 5.0),), True)
    assert sampling.seed == 2**64 - 1 != second.sampling.seed
    assert (first.priority, first.cache_salt, first.group_id) == (-4, b"me", second.group_id)


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason() -> None:
    async with talking() as (client, _):
        chunks = await streamed(client)
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(chunk.delta.content for chunk in middle) == "naïve café 🙂"
    assert not any("\ufffd" in chunk.delta.content for chunk in middle)
    assert all(output.delta.role is None and output.finish_reason is None for output in middle)
    assert (last.delta.content, last.finish_reason) == (None, "stop")
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


async def test_usage_comes_last_when_asked_for() -> None:
    async with talking() as (client, _):
        whole = await ask(client)
        *before, last = await streamed(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in before)


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_is_in_every_chunk_when_asked_for(n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with talking() as (client, _):
        chunks = await streamed(client, stream_options=options, n=n)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > n * len(ids_of("naïve café 🙂")) / 2, "they go on with the tokens"
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    "extra",
    [
        {"top_logprobs": 0, "logprobs": False},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "add_special_tokens": False},
        {"guided_json": None, "guided_decoding_backend": None, "truncate_prompt_tokens": None, "bad_words": []},
        {"spaces_between_special_tokens": True, "include_reasoning": True, "documents": None, "echo": False},
        {"kv_transfer_params": None, "mm_processor_kwargs": None, "logits_processors": None, "chat_template": None},
    ],
    ids=lambda extra: next(iter(extra)),
)
async def test_parameters_of_vllm_clients_are_accepted(extra: dict[str, Any]) -> None:
    async with talking() as (client, _):
        await ask(client, extra_body=extra)


async def test_messages_may_come_back_as_clients_have_them() -> None:
    """Fields of litellm's and vLLM's answers; reasoning goes to the template."""
    source = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "b",
        "provider_specific_fields": {"x": 1},
        "images": [],
        "refusal": None,
    }
    said["content"] = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    thoughts: list[dict[str, Any]] = [{"reasoning_content": "a", "reasoning": None}, {"reasoning": "a"}]
    async with talking(template=ChatTemplate(source)) as (client, generate):
        for thought in thoughts:
            await ask(client, messages=[said | thought])
    assert [ids_of("[a]b")] * 2 == [list(job.prompt_ids) for job in generate.jobs]


async def test_a_mark_for_a_cache_does_not_reach_the_template() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part | tojson }}{% endfor %}{% endfor %}"
    part = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    async with talking(template=ChatTemplate(source)) as (client, generate):
        await ask(client, messages=[{"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}])
    assert list(generate.jobs[0].prompt_ids) == ids_of('{"type": "text", "text": "b"}')


async def test_choices_are_told_apart() -> None:
    def script(job: Job) -> list[Any]:
        return token_deltas(ids_of(f"number {job.request_id[-1]}"), job)

    async with talking(script) as (client, _):
        reply = await ask(client, n=3)
        chunks = await streamed(client, n=3)
    assert [choice.message.content for choice in reply.choices] == ["number 0", "number 1", "number 2"]
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["number 0", "number 1", "number 2"]
    assert sum(chunk.choices[0].delta.role == "assistant" for chunk in chunks) == 3
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_tell_text_and_bytes(stream: bool) -> None:
    async with talking(saying("a 🙂")) as (client, _):
        if stream:
            chunks = await streamed(client, logprobs=True, top_logprobs=3)
            told = [chunk.choices[0].logprobs for chunk in chunks]
            entries = [entry for logprobs in told if logprobs is not None for entry in logprobs.content]
        else:
            reply = await ask(client, logprobs=True, top_logprobs=3)
            entries = reply.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "a 🙂<|end|>"
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == -1.5 for entry in entries)
    assert [logprob.logprob for logprob in entries[0].top_logprobs] == [-0.5, -1.5, -2.5]
    assert entries[0].top_logprobs[1].token == entries[0].token


async def test_logprobs_without_top() -> None:
    async with talking() as (client, _):
        reply = await ask(client, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in reply.choices[0].logprobs.content)


@pytest.mark.parametrize("stop", ["café", ["zzz", "café"]])
async def test_a_stop_string_is_not_in_the_answer(stop: Any) -> None:
    async with talking() as (client, generate):
        reply = await ask(client, stop=stop)
        chunks = await streamed(client, stop=stop)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("naïve ", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "naïve "
    assert len(generate.closed) == 2


async def test_token_ids_are_returned_on_demand() -> None:
    async with talking() as (client, generate):
        reply = await ask(client, extra_body={"return_token_ids": True})
        chunks = await streamed(client, extra_body={"return_token_ids": True})
    prompt, said = list(generate.jobs[0].prompt_ids), [*ids_of("naïve café 🙂"), ids_of("<|end|>")[0]]
    assert (reply.prompt_token_ids, reply.choices[0].token_ids) == (prompt, said)
    assert chunks[0].prompt_token_ids == prompt
    assert [token_id for chunk in chunks for token_id in getattr(chunk.choices[0], "token_ids", [])] == said


async def test_prompt_logprobs_are_returned_on_demand() -> None:
    async with talking() as (client, generate):
        reply = await ask(client, extra_body={"prompt_logprobs": 2})
        without = await ask(client, extra_body={"prompt_logprobs": 0})
    prompt = generate.jobs[0].prompt_ids
    assert len(reply.prompt_logprobs) == len(prompt)
    assert reply.prompt_logprobs[0] is None
    told = {"logprob": -1.5, "rank": 2, "decoded_token": "<|user|>"}
    assert reply.prompt_logprobs[1][str(prompt[1])] == told
    assert without.prompt_logprobs[1] == {str(prompt[1]): told}, "its rank is known without those before it"


async def test_text_parts_and_all_roles_are_read() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    roles = ["system", "developer", "user", "assistant"]
    messages: list[dict[str, Any]] = [{"role": role, "content": parts} for role in roles]
    messages.append({"role": "tool", "content": "42", "tool_call_id": "x"})
    async with talking() as (client, generate):
        await ask(client, messages=messages)
    expected = "".join(f"<|user|>{role}: one\ntwo<|end|>" for role in roles) + "<|user|>tool: 42<|end|>"
    assert list(generate.jobs[0].prompt_ids) == ids_of(f"<|bos|>{expected}<|assistant|>")


async def test_a_last_message_is_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "well"}]
    async with talking() as (client, generate):
        await ask(client, messages=messages, extra_body={"continue_final_message": True})
        await ask(client, messages=messages, extra_body={"add_generation_prompt": False})
        both = {"continue_final_message": True, "add_generation_prompt": True}
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            await ask(client, messages=messages, extra_body=both)
    opened, closed = (list(job.prompt_ids) for job in generate.jobs)
    assert opened == ids_of("<|bos|><|user|>user: hello<|end|><|user|>assistant: well")
    assert closed == ids_of("<|bos|><|user|>user: hello<|end|><|user|>assistant: well<|end|>")


async def test_a_template_that_refuses_is_a_bad_request() -> None:
    template = ChatTemplate("{{ raise_exception('only users may speak') }}")
    async with talking(template=template) as (client, _):
        with pytest.raises(openai.BadRequestError, match="only users may speak"):
            await ask(client)


async def test_a_model_without_a_template_says_where_to_go() -> None:
    async with talking(template=None) as (client, _):
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            await ask(client)


@pytest.mark.parametrize(
    ("options", "error", "code", "told"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "does not exist"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_request", "between 0 and 2"),
        ({"store": True}, openai.BadRequestError, "unsupported_parameter", "'store'"),
        ({"tools": [TOOL]}, openai.BadRequestError, "invalid_request", "does not support tools"),
        ({"tool_choice": "required"}, openai.BadRequestError, "invalid_request", "only allowed with tools"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "invalid_request", "Did you mean"),
        ({"max_tokens": 250}, openai.BadRequestError, "context_length_exceeded", "maximum context length is 256"),
        (
            {"messages": [{"role": "user", "content": "word " * 1000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "reduce the length of the messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_mistakes(options: dict[str, Any], error: Any, code: str, told: str, stream: bool) -> None:
    async with talking() as (client, generate):
        with pytest.raises(error, match=told) as refused:
            await ask(client, stream=stream, **options)
    assert refused.value.code == code
    assert not generate.jobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "error", "status"),
    [
        (NoWorkers("no decode worker"), openai.InternalServerError, 503),
        (Overloaded("too busy", retry_after_s=2.2), openai.RateLimitError, 429),
        (RuntimeError("a bug of ours"), openai.InternalServerError, 500),
    ],
)
async def test_failures_before_the_first_token_keep_their_status(
    failure: Exception, error: Any, status: int, stream: bool
) -> None:
    async with talking(lambda job: [failure]) as (client, _):
        with pytest.raises(error) as failed:
            await ask(client, stream=stream)
    assert failed.value.status_code == status
    assert "a bug of ours" not in str(failed.value), "what went wrong inside stays inside"
    assert failed.value.response.headers.get("retry-after") == ("3" if status == 429 else None)
    assert failed.value.response.headers.get("retry-after-ms") == ("2200" if status == 429 else None)


async def test_a_failure_in_the_middle_is_told_in_the_stream() -> None:
    def script(job: Job) -> list[Any]:
        return [TokenDelta(token_ids=tuple(ids_of("hello"))), WorkerLost("the worker died")]

    async with talking(script) as (client, _):
        stream = await ask(client, stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "hello"]
        with pytest.raises(openai.APIError, match="the worker died"):
            await anext(stream)
        with pytest.raises(openai.InternalServerError, match="the worker died"):
            await ask(client)


async def test_progress_of_the_prompt_is_told_when_asked_for() -> None:
    def script(job: Job) -> list[Any]:
        if not job.tells_progress:
            return token_deltas(ids_of("hello"), job)
        reading = [TokenDelta(num_prompt_computed=count, num_cached_tokens=1) for count in (2, 4)]
        return [*reading, *token_deltas(ids_of("hello"), job)]

    async with talking(script) as (client, _):
        whole = await ask(client)
        options = {"include_prefill_progress": True, "include_usage": True}
        chunks = await streamed(client, n=2, stream_options=options)
    told = [
        chunk.model_extra["prefill_progress"] for chunk in chunks if "prefill_progress" in (chunk.model_extra or {})
    ]
    total = whole.usage.prompt_tokens
    assert told == [
        {"index": 0, "computed_tokens": count, "cached_tokens": 1, "total_tokens": total} for count in (2, 4)
    ]
    spoken = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(spoken) == "hello" * 2, "who reads choices notices nothing"
    assert chunks[-1].usage.prompt_tokens == total
