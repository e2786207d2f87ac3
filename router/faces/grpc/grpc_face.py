"""The gRPC face: `protos/inference.proto`, with health checking and reflection, over the same path as HTTP."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from protos.errors import ERRORS_BY_CODE, Cancelled, InvalidRequest, Misconfigured, RequestTimeout
from protos.event_loop import loop_time
from protos.grpc_status import abort_with
from protos.listening import bound, netloc
from protos.tls import FaceTls, listen_grpc
from protos.values import Logprobs, SpeculationParams, TokenLogprob
from router.auth.tenants import Tenant
from router.faces.conversation.speculating import with_prediction
from router.gateway import Gateway
from router.http.access_log import is_logged, log_access
from router.http.body import read_json, shallow
from router.http.middleware import REQUEST_ID, request_name
from router.http.sse import StallWatch
from router.request_metrics import Arrival, Track, arrival
from router.text.grammar.structure import json_grammar, regex_grammar
from router.text.sampling_request import SamplingRequest, TextRequest, make_text_request
from router.text.text_stream import TextDelta, Usage, UsageCounter, collect

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcFace:
    """A server on one address. `health_period_s`: how often a health watcher is looked after."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        host: str,
        port: int,
        health_period_s: float = 1.0,
        tls: FaceTls | None = None,
        is_shared: bool = False,
    ) -> None:
        """`port` 0 takes a free one; several processes may share a port (`is_shared`). Create it on its event loop."""
        self._host, self._port, self._is_shared = host, port, is_shared
        self._credentials = tls.server_credentials() if tls is not None else None
        http = gateway.http
        limits = [("grpc.max_receive_message_length", http.max_body_bytes), ("grpc.so_reuseport", int(is_shared))]
        self._server = grpc.aio.server(options=limits, interceptors=[_InTime(http.body_timeout_s, http.stall_s)])
        pb_grpc.add_InferenceServicer_to_server(_Inference(gateway), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(gateway, health_period_s), self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listens; returns the port. Raises Misconfigured when the address is taken or not ours."""
        try:
            if self._port and not self._is_shared:
                with bound(self._host, self._port) as free:  # a busy port makes gRPC's core log several lines
                    free.listen()
            port = listen_grpc(self._server, self._host, self._port, self._credentials)
        except (OSError, RuntimeError) as error:
            where = netloc(self._host, self._port)
            raise Misconfigured(f"gRPC cannot listen on {where}: {_why(error)}", param="grpc-port") from error
        await self._server.start()
        return port

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new calls and cuts off those that still run after `grace_s`."""
        await self._server.stop(grace_s)


class _InTime(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic when it runs
    """Ends calls whose request does not arrive in time, and streams whose client reads nothing for `stall_s`. Unary
    methods are served as streams, which is the same on the wire: gRPC would wait for the request without a limit."""

    def __init__(self, timeout_s: float, stall_s: float) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_s

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        decode, codec = handler.request_deserializer, {"response_serializer": handler.response_serializer}
        if handler.response_streaming:
            answers = handler.unary_stream

            async def stream(requests: AsyncIterator[Any], context: Context) -> None:
                async with (
                    _answered(context),
                    aclosing(answers(await self._first(requests, decode), context)) as messages,
                ):
                    async for message in messages:
                        await self._write(context, message)

            return grpc.stream_stream_rpc_method_handler(stream, **codec)
        answer = handler.unary_unary

        async def whole(requests: AsyncIterator[Any], context: Context) -> Any:
            async with _answered(context):
                return await answer(await self._first(requests, decode), context)

        return grpc.stream_unary_rpc_method_handler(whole, **codec)

    async def _write(self, context: Context, message: Any) -> None:
        """Waits for a client that reads slowly. Raises Cancelled if it reads nothing for `stall_s`, which shows only
        once gRPC's buffers and the client's window are full."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(message)
        except TimeoutError:
            raise Cancelled(f"the client has read nothing for {self._stall_s:g} s") from None
        except grpc.aio.InternalError:  # a message that waited for room when the call ended
            raise Cancelled("the client has gone") from None

    async def _first(self, messages: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                async for message in messages:
                    return decode(message)
        except TimeoutError:
            problem = f"the request did not come within {self._timeout_s:g} s: send it with the call"
            raise RequestTimeout(problem) from None
        except DecodeError:
            problem = "the request is not a protobuf message of this method: make it from protos/inference.proto"
            raise InvalidRequest(problem) from None
        raise InvalidRequest("the call has no request: send one message")


@asynccontextmanager
async def _answered(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status of an error. After a stall the sequences have ended; the status may never be
    taken."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await abort_with(context, error)


class _Inference(pb_grpc.InferenceServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[pb.GenerateChunk, None]:
        name = await _named(context, self._gateway)
        with self._measured("grpc.generate", name, context) as track:
            ask = await self._ask(request, context, name)
            gateway, tally = self._gateway.serving(request.model), UsageCounter(ask)
            num_written, is_writing = 0, False
            watched = StallWatch(inf, track)(lambda: num_written if is_writing else None, lambda: None)
            async with aclosing(gateway.answer(ask, track)) as pieces:
                with watched:
                    async for piece in pieces:
                        tally.add(piece)
                        is_writing = True
                        yield pb.GenerateChunk(**_fields(piece))
                        num_written, is_writing = num_written + 1, False
            usage = tally.usage()
            yield pb.GenerateChunk(usage=_usage(usage))

    async def Complete(self, request: pb.GenerateRequest, context: Context) -> pb.Completion:
        name = await _named(context, self._gateway)
        with self._measured("grpc.complete", name, context) as track:
            ask = await self._ask(request, context, name)
            gateway = self._gateway.serving(request.model)
            choices, usage = await collect(gateway.answer(ask, track), ask)
            return pb.Completion(
                request_id=ask.request_id,
                model=gateway.card.name,
                choices=[pb.Choice(**_fields(whole)) for whole in choices],
                usage=_usage(usage),
            )

    @contextmanager
    def _measured(self, endpoint: str, name: str, context: Context) -> Iterator[Track]:
        clock = asyncio.get_running_loop().time
        begun_s, track = clock(), self._gateway.metrics.track(endpoint)
        try:
            with track:
                yield track
        finally:
            if is_logged():
                status = 200 if track.outcome == "ok" else ERRORS_BY_CODE[track.outcome].http_status
                log_access(
                    "gRPC", endpoint.removeprefix("grpc."), status, clock() - begun_s, client=context.peer(),
                    request=name, tenant=track.tenant, track=track,
                )  # fmt: skip

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        self._tenant(context)
        gateway = self._gateway.serving(request.model)
        [ids] = await gateway.texts.encode([request.text], split_special_tokens=_split(request))
        return pb.TokenizeReply(ids=ids)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        self._tenant(context)
        models = [
            pb.Model(id=name, max_model_len=one.card.max_model_len)
            for one in self._gateway.each
            for name in (one.card.name, *one.fleet.adapters())
        ]
        return pb.ListModelsReply(models=models)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        self._gateway.access.check_admin(_authorization(context))
        fleet = self._gateway.fleet
        workers = [
            pb.WorkerStatus(
                worker_id=one.worker_id,
                role=one.info.role if one.info else "",
                address=one.address,
                state=one.state,
                num_running=one.load.num_running,
                num_waiting=one.load.num_waiting,
                num_free_blocks=one.load.num_free_blocks,
                num_blocks=one.load.num_blocks,
            )
            for one in fleet.status()
        ]
        return pb.StatusReply(ready=self._gateway.ready(), model=self._gateway.card.name, workers=workers)

    async def _ask(self, request: pb.GenerateRequest, context: Context, name: str) -> TextRequest:
        tenant = self._tenant(context)
        gateway = self._gateway.serving(request.model)
        sampling = _asked(request)
        if form := request.sampling.WhichOneof("form"):
            sampling = replace(
                sampling, grammar=_grammar(request.sampling, form, compact=gateway.texts.config.disable_any_whitespace)
            )
            await gateway.texts.grammars.check(sampling.grammar, param=form)
        if predicted := request.WhichOneof("prediction"):
            speculation = await self._predicted(gateway, request, predicted, sampling.speculation)
            sampling = replace(sampling, speculation=speculation)
        match request.WhichOneof("prompt"):
            case "tokens":
                prompt = tuple(request.tokens.ids)
            case "text":
                [prompt] = await gateway.texts.encode([request.text], split_special_tokens=_split(request))
            case _:
                raise InvalidRequest("'prompt' is missing: give text or tokens", param="prompt")
        return make_text_request(
            sampling,
            [prompt],
            gateway.card,
            request_id=gateway.new_id("grpc"),
            group_id=name,
            tenant=tenant,
        )

    async def _predicted(
        self, gateway: Gateway, request: pb.GenerateRequest, form: str, params: SpeculationParams
    ) -> SpeculationParams:
        if form == "predicted_text":
            return await with_prediction(gateway, params, request.predicted_text)
        return replace(params, prediction_ids=tuple(request.predicted_tokens.ids))

    def _tenant(self, context: Context) -> Tenant:
        """Raises Unauthenticated."""
        return self._gateway.access.identify(_authorization(context))


def _split(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool | None:
    return request.split_special_tokens if request.HasField("split_special_tokens") else None


async def _named(context: Context, gateway: Gateway) -> str:
    """The call's name: the client's, if it is a short plain word. Sends it in the first metadata. Notes the call's
    arrival and its trace."""
    metadata = dict(context.invocation_metadata() or ())
    arrival.set(Arrival(loop_time(), _text(metadata, "traceparent")))
    name = request_name(_text(metadata, REQUEST_ID), gateway.names)
    await context.send_initial_metadata(((REQUEST_ID, name),))
    return name


def _text(metadata: Mapping[str, str | bytes], name: str) -> str:
    value = metadata.get(name, "")
    return value if isinstance(value, str) else ""


def _authorization(context: Context) -> str | None:
    given = dict(context.invocation_metadata() or ()).get("authorization")
    return given if isinstance(given, str) else None


class _Health:
    """grpc.health.v1, which checks the fleet at each call, so that it always agrees with /ready."""

    def __init__(self, gateway: Gateway, period_s: float) -> None:
        self._gateway = gateway
        self._period_s = period_s

    async def Check(self, request: Any, context: Context) -> Any:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:
        known = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in ("", SERVICE)}
        return health_pb2.HealthListResponse(statuses=known)

    async def Watch(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        last = None
        while True:
            if (status := self._status(request.service)) != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(self._period_s)

    def _status(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        states = health_pb2.HealthCheckResponse
        return states.SERVING if self._gateway.ready() else states.NOT_SERVING


_OPTIONAL = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logprobs", "min_tokens", "max_tokens",
)  # fmt: skip


def _asked(request: pb.GenerateRequest) -> SamplingRequest:
    sampling = request.sampling
    given: dict[str, Any] = {field.name: value for field, value in sampling.ListFields() if field.name in _OPTIONAL}
    return SamplingRequest(
        **given,
        n=request.n or 1,
        stop=tuple(request.stop),
        logit_bias=tuple(sampling.logit_bias.items()),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        cache_salt=request.cache_salt,
        priority=request.priority,
        max_ttft_ms=request.max_ttft_ms if request.HasField("max_ttft_ms") else None,
        speculation=_speculation(sampling.speculation),
    )


def _speculation(given: pb.Speculation) -> SpeculationParams:
    return SpeculationParams(
        mode="off" if given.HasField("enabled") and not given.enabled else "",
        max_drafts=(given.max_drafts or -1) if given.HasField("max_drafts") else 0,
        sources=tuple(given.sources),
    )


def _grammar(sampling: pb.Sampling, form: str, *, compact: bool) -> str:
    match form:
        case "json_schema":
            try:
                schema = shallow(read_json(sampling.json_schema))
            except ValueError as error:
                raise InvalidRequest(f"'json_schema' is not valid JSON: {error}", param=form) from None
            if not isinstance(schema, dict):
                raise InvalidRequest("'json_schema' must be a JSON object", param=form)
            return json_grammar(schema, compact=compact)
        case "regex":
            return regex_grammar(sampling.regex)
        case _:
            return sampling.grammar


def _fields(piece: TextDelta) -> dict[str, Any]:
    return {
        "index": piece.index, "text": piece.text, "token_ids": piece.token_ids,
        "logprobs": _logprobs(piece.logprobs), "finish_reason": piece.finish_reason or "",
    }  # fmt: skip


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
    )


def _logprobs(entries: Iterable[Logprobs]) -> list[pb.Logprobs]:
    return [pb.Logprobs(chosen=_one(entry.chosen), top=[_one(one) for one in entry.top]) for entry in entries]


def _one(one: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=one.token_id, logprob=one.logprob)


def _why(error: OSError | RuntimeError) -> str:
    """And what to do. gRPC's own error has no reason; all but the last were found before."""
    if not isinstance(error, OSError) or error.errno == errno.EADDRINUSE:
        return "the port is taken; choose another with --grpc-port (0: any free one)"
    reason = str(error.strerror or error).partition(" (while")[0]  # asyncio and socket repeat the address
    return f"{reason}; see --host and --grpc-port"
