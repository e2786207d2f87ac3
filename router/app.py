"""The HTTP face: routes, and the one place where an error becomes a response.

Its routes are Starlette's, of a FastAPI application that serves /openapi.json: FastAPI's own would cost a short request
as much as all that is done for it, and add nothing, for bodies and answers are read and written here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from protos.errors import BatonError, InvalidRequest, NotFound
from router.admin.routes import mount_admin
from router.admin.status import degraded, not_ready
from router.anthropic.api import ANTHROPIC
from router.anthropic.messages import count_tokens, messages
from router.batches.routes import FILES, mount_batches
from router.conversation.parts import IGNORED
from router.conversation.thinking import knows_effort
from router.dashboard.page import mount_page
from router.gateway import Gateway
from router.http.api import Api, api_of
from router.http.errors import error_response, json_response
from router.http.middleware import BUDGET, REQUEST_ID, Authenticate, BodyLimit, HeadLimit, OwnPages, RequestId
from router.http.sse import EventStream
from router.message_batches.routes import PATH as MESSAGE_BATCHES
from router.message_batches.routes import mount_message_batches
from router.metrics import Track
from router.ollama import answers as ollama
from router.ollama.api import OLLAMA
from router.ollama.embed import ollama_vector, ollama_vectors
from router.ollama.models import SPOKEN_VERSION, loaded, show, tags
from router.openai.chat import chat_completions
from router.openai.completions import completions
from router.openai.embeddings import embeddings
from router.openai.models import model_list, one_model
from router.openai.tokens import detokenize, tokenize
from router.openapi import describe
from router.responses.responses import count_input_tokens, responses
from router.text.chat_template import ROLES

MAX_HEAD_BYTES = 64 * 1024
APIS: Sequence[Api] = (ANTHROPIC, OLLAMA)
"""Those whose answers are not in OpenAI's form."""

_WHERE_TO_LOOK = "APIs begin at /v1 and /api, /openapi.json lists them, / is a page for people"
_MODELS_STAY = "models are given when the server starts (--model); adapters come and go with `baton adapter`"
_ABSENT: Mapping[str, str] = {
    "/v1/responses/": "responses are not stored; send the whole input with each request",
    "/v1/conversations": "conversations are not stored; send the whole input with each request",
} | {f"/api/{verb}": _MODELS_STAY for verb in ("pull", "push", "create", "copy", "delete", "blobs")}
"""Why parts of APIs are absent, by the beginning of their paths."""

Generating = Callable[[Gateway, Request, Track], Awaitable[Response | EventStream]]


def create_app(gateway: Gateway) -> FastAPI:
    """The application for a gateway. Nothing runs in the background: it needs no start and no stop."""
    # The pages of documentation would load scripts from the network; /openapi.json is all they are made of.
    # Without telemetry: FastAPI would look for an OpenTelemetry provider at each request.
    app = FastAPI(
        title="Baton",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_layers(gateway),
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    _generating_routes(app, gateway)
    app.add_exception_handler(BatonError, _refused)
    app.add_exception_handler(HTTPException, _unrouted)
    mount_page(app, gateway)
    _asking_routes(app, gateway)
    mount_batches(app, gateway)
    mount_message_batches(app, gateway)
    _ollama_routes(app, gateway)
    _operating_routes(app, gateway)
    mount_admin(app, gateway)

    @cache  # a delay of a tenth of a second for all tokens
    def described(needs_key: bool, needs_admin_key: bool) -> dict[str, Any]:
        return describe(
            app,
            [one.card for one in gateway.each],
            needs_key=needs_key,
            needs_admin_key=needs_admin_key,
            has_tools=all(one.has_tools for one in gateway.each),
            has_effort=all(map(knows_effort, gateway.each)),
            roles=_roles(gateway),
        )

    def document() -> dict[str, Any]:
        roster = gateway.access.roster
        return described(not roster.is_open, bool(roster.admin_keys))

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way of changing it
    return app


def _roles(gateway: Gateway) -> Sequence[str]:
    """Those of messages to any of the models."""
    known = [one.template.roles() if one.template is not None else ROLES for one in gateway.each]
    return [role for role in known[0] if all(role in roles for roles in known)]


def _layers(gateway: Gateway) -> list[Middleware]:
    """The first one is the first to see a request."""
    layers = [
        Middleware(RequestId, apis=APIS, arrived=gateway.telemetry.arrived if gateway.telemetry is not None else None),
        Middleware(HeadLimit, max_bytes=MAX_HEAD_BYTES),
        Middleware(OwnPages, access=gateway.access, origins=gateway.cors_origins, hosts=gateway.hosts),
        Middleware(Authenticate, access=gateway.access),
        Middleware(
            BodyLimit, max_bytes=gateway.max_body_bytes, timeout_s=gateway.body_timeout_s, uploads=_uploads(gateway)
        ),
    ]
    if gateway.cors_origins:
        # First: a browser's preflight has no key, and must be able to read a refusal.
        across = Middleware(
            CORSMiddleware,
            allow_origins=gateway.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, BUDGET, "request-id", "x-request-id", IGNORED, "retry-after", "retry-after-ms"],
        )
        layers.insert(0, across)
    return layers


def _uploads(gateway: Gateway) -> Mapping[str, int]:
    """Paths of large bodies; a form's fields and boundaries come beside its file."""
    if gateway.batches is None:
        return {}
    return dict.fromkeys((FILES, MESSAGE_BATCHES), gateway.batches.max_file_bytes + MAX_HEAD_BYTES)


def _generating_routes(app: FastAPI, gateway: Gateway) -> None:
    chat = _GeneratingEndpoint(gateway, "chat.completions", chat_completions)
    complete = _GeneratingEndpoint(gateway, "completions", completions)
    converse = _GeneratingEndpoint(gateway, "messages", messages)
    respond = _GeneratingEndpoint(gateway, "responses", responses)
    ollama_chat = _GeneratingEndpoint(gateway, "ollama.chat", ollama.chat)
    ollama_generate = _GeneratingEndpoint(gateway, "ollama.generate", ollama.generate)
    embed = _GeneratingEndpoint(gateway, "embeddings", embeddings)
    ollama_embed = _GeneratingEndpoint(gateway, "ollama.embed", ollama_vectors)
    ollama_embeddings = _GeneratingEndpoint(gateway, "ollama.embed", ollama_vector)
    app.router.routes[:0] = [  # before /openapi.json: routes are matched in their order
        Route("/v1/chat/completions", chat, methods=["POST"], name="chat"),
        Route("/v1/completions", complete, methods=["POST"], name="complete"),
        Route("/v1/messages", converse, methods=["POST"], name="messages"),
        Route("/v1/responses", respond, methods=["POST"], name="responses"),
        Route("/v1/embeddings", embed, methods=["POST"], name="embed"),
        Route("/api/embed", ollama_embed, methods=["POST"], name="ollama_embed"),
        Route("/api/embeddings", ollama_embeddings, methods=["POST"], name="ollama_embeddings"),
        Route("/api/chat", ollama_chat, methods=["POST"], name="ollama_chat"),
        Route("/api/generate", ollama_generate, methods=["POST"], name="ollama_generate"),
    ]


class _GeneratingEndpoint:
    """An ASGI application: what Starlette and FastAPI put round a function costs as much as a request's validation."""

    def __init__(self, gateway: Gateway, name: str, serve: Generating) -> None:
        self._gateway = gateway
        self._name = name
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        track = scope["state"]["track"] = self._gateway.metrics.track(self._name)
        try:
            response = await self._serve(self._gateway, Request(scope, receive, send), track)
        except BaseException as error:
            track.finish(error)
            raise
        if not isinstance(response, EventStream):  # a stream finishes its track itself, when it ends
            track.finish()
        await response(scope, receive, send)


def _asking_routes(app: FastAPI, gateway: Gateway) -> None:
    async def models(request: Request) -> Response:
        return json_response(model_list(gateway))

    async def model(request: Request) -> Response:
        return json_response(one_model(gateway, request.path_params["name"]))

    async def to_tokens(request: Request) -> Response:
        return await tokenize(gateway, request)

    async def to_text(request: Request) -> Response:
        return await detokenize(gateway, request)

    async def counted(request: Request) -> Response:
        return await count_tokens(gateway, request)

    async def counted_input(request: Request) -> Response:
        return await count_input_tokens(gateway, request)

    app.add_route("/v1/messages/count_tokens", counted, methods=["POST"])
    app.add_route("/v1/responses/input_tokens", counted_input, methods=["POST"])
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", model)
    app.add_route("/tokenize", to_tokens, methods=["POST"])
    app.add_route("/detokenize", to_text, methods=["POST"])


def _ollama_routes(app: FastAPI, gateway: Gateway) -> None:
    async def tagged(request: Request) -> Response:
        return await tags(gateway)

    async def shown(request: Request) -> Response:
        return await show(gateway, request)

    async def version(request: Request) -> Response:
        return json_response({"version": SPOKEN_VERSION})

    async def running(request: Request) -> Response:
        return await loaded(gateway)

    app.add_route("/api/tags", tagged)
    app.add_route("/api/ps", running)
    app.add_route("/api/show", shown, methods=["POST"])
    app.add_route("/api/version", version)


def _operating_routes(app: FastAPI, gateway: Gateway) -> None:
    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        ready = gateway.ready()
        status = {"ready": ready, "reason": not_ready(gateway), "degraded": degraded(gateway)}
        return json_response(status, status=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        ports = gateway.replica_ports
        if ports and request.scope["server"][1] not in ports:
            raise NotFound(
                "Every gateway process counts for itself, and this port leads to any of them: scrape the port of each: "
                + ", ".join(map(str, ports))
            )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(gateway.scraped or gateway.metrics.registry), media_type=content_type)

    app.add_route("/health", health)
    app.add_route("/ready", ready)
    app.add_route("/metrics", metrics)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return error_response(error, api_of(request.scope))


async def _unrouted(request: Request, error: Exception) -> Response:
    """The route does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    path, method, headers = request.url.path[:200], request.method, MutableHeaders(error.headers or {})
    if error.status_code == 405:
        allowed = headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
        refusal: BatonError = InvalidRequest(f"{path} does not answer {method}: use {allowed}")
    elif error.status_code == 404:
        why = next((why for prefix, why in _ABSENT.items() if path.startswith(prefix)), _WHERE_TO_LOOK)
        refusal = NotFound(f"There is nothing at {path}: {why}")
    else:
        refusal = InvalidRequest(str(error.detail))
    return json_response(api_of(request.scope).error_body(refusal), status=error.status_code, headers=dict(headers))
