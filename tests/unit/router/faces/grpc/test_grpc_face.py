"""The internal service over a real channel: the same answers as over HTTP, with typed errors, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from protos.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    Misconfigured,
    NoWorkers,
    RequestTimeout,
    UnknownModel,
)
from protos.grpc_status import CODE_KEY, error_of
from protos.values import SpeculationParams
from router.faces.grpc.grpc_face import SERVICE, GrpcFace
from router.jobs import Job, TokenDelta
from router.request_metrics import RequestMetrics
from router.text.grammar.structure import json_grammar, regex_grammar
from tests.unit.router.faces.openai.test_predictions import as_predicted
from tests.unit.router.scripted import Crew, Script, Scripted, ids_of, make_gateway, saying, token_deltas

TEXT = "naïve café 🙂"


@asynccontextmanager
async def calling(script: Script | None = None, **changes: Any) -> AsyncIterator[tuple[grpc.aio.Channel, Scripted]]:
    generate = Scripted(script or saying(TEXT))
    face = GrpcFace(make_gateway(generate, **changes), host="127.0.0.1", port=0, health_period_s=0.001)
    port = await face.start()
    try:
        # A window that does not grow is full after a few messages.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.http2.bdp_probe", 0)]) as channel:
            yield channel, generate
    finally:
        await face.stop()


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"model": "tiny", "text": "hello"} | fields))


async def test_an_answer_comes_in_chunks_and_ends_with_the_usage() -> None:
    async with calling() as (channel, generate):
        *chunks, last = [chunk async for chunk in pb_grpc.InferenceStub(channel).Generate(request())]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [*ids_of(TEXT), *ids_of("<|end|>")]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    prompt = generate.jobs[0].prompt_ids
    assert list(prompt) == ids_of("<|bos|>hello")
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (len(prompt), len(prompt) // 2)
    assert last.usage.completion_tokens == len(ids_of(TEXT)) + 1


async def test_special_tokens_of_a_text_are_split_on_request() -> None:
    async with calling() as (channel, generate):
        stub = pb_grpc.InferenceStub(channel)
        for split in (False, True):
            await stub.Complete(request(text="<|end|>", split_special_tokens=split))
            told = await stub.Tokenize(pb.TokenizeRequest(model="tiny", text="<|end|>", split_special_tokens=split))
            assert list(told.ids) == list(generate.jobs[-1].prompt_ids)
    whole_ids, split_ids = ([*job.prompt_ids] for job in generate.jobs)
    assert whole_ids == ids_of("<|bos|><|end|>")
    assert split_ids == [*ids_of("<|bos|>"), *ids_of("<"), *ids_of("|end|>")]


async def test_a_call_has_a_name() -> None:
    async with calling() as (channel, generate):
        complete = pb_grpc.InferenceStub(channel).Complete
        own, fresh = complete(request(), metadata=(("x-baton-request-id", "mine"),)), complete(request())
        names = [dict(await call.initial_metadata())["x-baton-request-id"] for call in (own, fresh)]
        await asyncio.gather(own, fresh)
    assert names[0] == "mine"
    assert str(names[1]).startswith("req-")
    assert sorted(job.group_id for job in generate.jobs) == sorted(names)


async def test_an_answer_comes_whole() -> None:
    def script(job: Job) -> list[Any]:
        return token_deltas(ids_of(f"number {job.request_id[-1]}"), job)

    sampling = pb.Sampling(logprobs=2, max_tokens=50)
    async with calling(script) as (channel, _):
        reply = await pb_grpc.InferenceStub(channel).Complete(request(n=2, sampling=sampling))
    assert [(choice.index, choice.text, choice.finish_reason) for choice in reply.choices] == [
        (0, "number 0", "stop"),
        (1, "number 1", "stop"),
    ]
    assert reply.model == "tiny"
    first = reply.choices[0].logprobs[0]
    assert (first.chosen.token_id, first.chosen.logprob) == (ids_of("number 0")[0], -1.5)
    assert [token.logprob for token in first.top] == [-0.5, -1.5]
    assert reply.usage.completion_tokens == sum(len(choice.token_ids) for choice in reply.choices)


async def test_missing_fields_take_defaults_and_zero_is_no_default() -> None:
    async with calling() as (channel, generate):
        stub = pb_grpc.InferenceStub(channel)
        await stub.Complete(request())
        await stub.Complete(request(sampling=pb.Sampling(temperature=0.0, seed=2**64 - 1, logit_bias={300: -5.0})))
    default, greedy = (job.sampling for job in generate.jobs)
    assert (default.temperature, default.max_tokens, default.logprobs) == (0.7, 16, None)
    assert (greedy.temperature, greedy.seed, greedy.logit_bias) == (0.0, 2**64 - 1, ((300, -5.0),))


async def test_token_ids_are_taken_as_they_are() -> None:
    async with calling() as (channel, generate):
        await pb_grpc.InferenceStub(channel).Complete(request(text=None, tokens=pb.TokenIds(ids=[5, 6, 7])))
    assert generate.jobs[0].prompt_ids == (5, 6, 7)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_call_without_its_request_is_ended(method: str) -> None:
    async def silent() -> AsyncIterator[pb.GenerateRequest]:
        await asyncio.Event().wait()
        yield request()

    async with calling(body_timeout_s=0.05) as (channel, generate):
        kind: Any = channel.stream_stream if method == "Generate" else channel.stream_unary
        call = kind(f"/{SERVICE}/{method}", pb.GenerateRequest.SerializeToString)(silent(), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await (call.read() if method == "Generate" else call)
    assert isinstance(error_of(failed.value), RequestTimeout)
    assert not generate.jobs


@pytest.mark.parametrize("method", ["Generate", "Complete", "Tokenize"])
async def test_an_unreadable_request_is_the_clients_fault(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with calling() as (channel, generate):
        kind: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(f"/{SERVICE}/{method}")(b"\xff" * 7)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await (call.read() if method == "Generate" else call)
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = error_of(failed.value)
    assert isinstance(error, InvalidRequest)
    assert "not a protobuf message of this method" in error.message
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert not generate.jobs


async def test_a_stop_string_ends_the_job() -> None:
    async with calling() as (channel, generate):
        reply = await pb_grpc.InferenceStub(channel).Complete(request(stop=["café"]))
    assert reply.choices[0].text == "naïve "
    assert len(generate.closed) == 1


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"json_schema": '{"type": "object"}'}, json_grammar({"type": "object"})),
        ({"regex": "a+"}, regex_grammar("a+")),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
    ],
)
async def test_an_answers_form_reaches_the_workers(form: dict[str, Any], grammar: str) -> None:
    async with calling() as (channel, generate):
        await pb_grpc.InferenceStub(channel).Complete(request(sampling=pb.Sampling(**form)))
    assert generate.jobs[0].sampling.grammar == grammar


async def test_a_prediction_reaches_the_workers_and_is_counted() -> None:
    speculation = pb.Speculation(enabled=True, sources=["ngram"], max_drafts=2)
    async with calling(as_predicted) as (channel, generate):
        stub = pb_grpc.InferenceStub(channel)
        whole = await stub.Complete(request(predicted_text=TEXT, sampling=pb.Sampling(speculation=speculation)))
        async for chunk in stub.Generate(request(predicted_tokens=pb.TokenIds(ids=[5, 6]))):
            last = chunk
    first, second = [job.sampling.speculation for job in generate.jobs]
    assert first == SpeculationParams(prediction_ids=tuple(ids_of(TEXT)), sources=("ngram",), max_drafts=2)
    assert second == SpeculationParams(prediction_ids=(5, 6))
    for usage in (whole.usage, last.usage):
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "error", "status", "told"),
    [
        ({"model": "other"}, UnknownModel, grpc.StatusCode.NOT_FOUND, "does not exist"),
        ({"sampling": pb.Sampling(temperature=9)}, InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, "between 0 and 2"),
        (
            {"sampling": pb.Sampling(json_schema='{"type": "thing"}')},
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
            "'json_schema' cannot be enforced",
        ),
        (
            {"sampling": pb.Sampling(speculation=pb.Speculation(sources=["oracle"]))},
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
            "'speculation.sources' has the value oracle: it must be made of ngram, suffix",
        ),
        (
            {"sampling": pb.Sampling(speculation=pb.Speculation(max_drafts=0))},
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
            "'speculation.max_drafts' has the value 0: it must be between 1 and 32",
        ),
        (
            {"predicted_tokens": pb.TokenIds(ids=[512])},
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
            "'prediction' has the value 512",
        ),
        ({"text": None}, InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, "'prompt' is missing"),
        ({"text": "word " * 1000}, ContextLengthExceeded, grpc.StatusCode.INVALID_ARGUMENT, "maximum context length"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_the_clients_mistakes(
    wrong: dict[str, Any], error: type[BatonError], status: grpc.StatusCode, told: str, method: str
) -> None:
    async with calling() as (channel, generate):
        refused = await failing(channel, method, request(**wrong))
    assert refused.code() is status
    trailing: Any = refused.trailing_metadata()
    assert dict(trailing)[CODE_KEY] == error.code
    assert type(error_of(refused)) is error
    assert told in (refused.details() or "")
    assert not generate.jobs


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_failures_keep_their_type(method: str) -> None:
    async with calling(lambda job: [NoWorkers("nobody", retry_after_s=2.0)]) as (channel, _):
        refused = await failing(channel, method, request())
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    error = error_of(refused)
    assert (type(error), error.retry_after_s) == (NoWorkers, 2.0)


async def failing(channel: grpc.aio.Channel, method: str, message: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    stub = pb_grpc.InferenceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await (stub.Complete(message) if method == "Complete" else stub.Generate(message).read())
    return failed.value


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_ends_its_jobs(n: int) -> None:
    metrics = RequestMetrics()
    first = TokenDelta(token_ids=tuple(ids_of("hello")))
    async with calling(lambda job: [first, asyncio.Event()], metrics=metrics) as (channel, generate):
        call: Any = pb_grpc.InferenceStub(channel).Generate(request(n=n))
        assert (await call.read()).text == "hello"
        call.cancel()
        await asyncio.wait_for(generate.idle.wait(), timeout=60)
    assert len(generate.closed) == n
    outcome = {"endpoint": "grpc.generate", "outcome": "cancelled", "model": ""}
    assert metrics.registry.get_sample_value("baton_requests_total", outcome) == 1


async def test_a_client_that_takes_nothing_is_cut_and_its_jobs_end() -> None:
    def script(job: Job) -> Iterator[TokenDelta]:
        while True:  # more than the window of the connection holds
            yield TokenDelta(token_ids=tuple(ids_of("x")) * 2_000)

    async with calling(script, stall_s=0.1, metrics=(metrics := RequestMetrics())) as (channel, generate):
        call = pb_grpc.InferenceStub(channel).Generate(request(sampling=pb.Sampling(ignore_eos=True)))
        async with asyncio.timeout(60):
            await generate.idle.wait()
        call.cancel()
    outcome = {"endpoint": "grpc.generate", "outcome": "cancelled", "model": ""}
    assert metrics.registry.get_sample_value("baton_requests_total", outcome) == 1


async def test_workers_learn_when_a_client_stops_and_resumes_reading() -> None:
    told: list[bool] = []
    has_told = asyncio.Event()

    def send(is_unread: bool) -> None:
        told.append(is_unread)
        has_told.set()

    def script(job: Job) -> Iterator[TokenDelta]:
        job.client.send = send
        while True:  # more than the window of the connection holds
            yield TokenDelta(token_ids=tuple(ids_of("x")) * 2_000)

    async with calling(script) as (channel, generate):
        call: Any = pb_grpc.InferenceStub(channel).Generate(request(sampling=pb.Sampling(ignore_eos=True)))
        await has_told.wait()
        assert told[-1]
        has_told.clear()
        while not has_told.is_set() or told[-1]:
            await call.read()
        call.cancel()
        await generate.idle.wait()
    assert not told[-1]


async def test_a_client_that_goes_away_unread_is_no_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    is_unread = asyncio.Event()

    def script(job: Job) -> Iterator[TokenDelta]:
        job.client.send = lambda _: is_unread.set()
        while True:
            yield TokenDelta(token_ids=tuple(ids_of("x")) * 2_000)

    async with calling(script, metrics=(metrics := RequestMetrics())) as (channel, generate):
        call = pb_grpc.InferenceStub(channel).Generate(request(sampling=pb.Sampling(ignore_eos=True)))
        await is_unread.wait()
        call.cancel()
        await generate.idle.wait()
    outcome = {"endpoint": "grpc.generate", "outcome": "cancelled", "model": ""}
    assert metrics.registry.get_sample_value("baton_requests_total", outcome) == 1
    assert not caplog.records


async def test_texts_models_and_workers_are_told() -> None:
    async with calling() as (channel, _):
        stub = pb_grpc.InferenceStub(channel)
        tokens = await stub.Tokenize(pb.TokenizeRequest(model="tiny", text="hello"))
        models = await stub.ListModels(pb.ListModelsRequest())
        status = await stub.Status(pb.StatusRequest())
    assert list(tokens.ids) == ids_of("<|bos|>hello")
    assert [(model.id, model.max_model_len) for model in models.models] == [("tiny", 256)]
    assert (status.ready, status.model) == (True, "tiny")
    [worker] = status.workers
    assert (worker.worker_id, worker.state, worker.num_running, worker.num_blocks) == ("decode-0", "ready", 3, 64)


async def test_health_follows_the_fleet() -> None:
    fleet, states = Crew(), health_pb2.HealthCheckResponse
    async with calling(fleet=fleet) as (channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watched.read()).status == states.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
        fleet.is_ready = False
        assert (await watched.read()).status == states.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == states.NOT_SERVING
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: value.status for name, value in listed.statuses.items()} == {
            "": states.NOT_SERVING,
            SERVICE: states.NOT_SERVING,
        }
        with pytest.raises(grpc.aio.AioRpcError, match="there is no service other"):
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))


async def test_the_service_can_be_explored() -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with calling() as (channel, _):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        listed = await call.read()
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_port_that_is_taken_is_named() -> None:
    face = GrpcFace(make_gateway(Scripted(saying(TEXT))), host="127.0.0.1", port=0)
    port = await face.start()
    other = GrpcFace(make_gateway(Scripted(saying(TEXT))), host="127.0.0.1", port=port)
    told = f"^gRPC cannot listen on 127.0.0.1:{port}: the port is taken; choose another with --grpc-port"
    with pytest.raises(Misconfigured, match=told):
        await other.start()
    await other.stop()
    await face.stop()


async def test_an_unusable_address_is_named_once_with_its_flag() -> None:
    face = GrpcFace(make_gateway(Scripted(saying(TEXT))), host="192.0.2.77", port=8001)
    with pytest.raises(Misconfigured) as refused:
        await face.start()
    assert refused.value.message.count("192.0.2.77") == 1
    assert "--host" in refused.value.message
    await face.stop()
