"""The HTTP face: its endpoints, and the one place where an error becomes a response.

    /v1/chat/completions {"model": "b"} ─▶ the first model's application ─▶ Gateway.serving("b")
    /models/b/...                       ─▶ b's application: its page, /admin, /metrics, and every API

Routes are Starlette's, of a FastAPI application that serves /openapi.json: FastAPI's own would cost a short request as
much as all that is done for it, and add nothing, for bodies and answers are read and written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.errors import BatonError, InvalidRequest, Misconfigured, NotFound, UnknownModel
from protos.hints import listed
from router.admin.admin_face import ADMIN_FACE
from router.admin.dashboard.dashboard_page import page
from router.admin.status_routes import degraded, not_ready
from router.batches.batch_routes import BATCHES_FACE
from router.batches.message_batch_routes import MESSAGE_BATCHES_FACE
from router.faces.anthropic.messages import ANTHROPIC_FACE
from router.faces.conversation.parts import IGNORED
from router.faces.endpoint import Endpoint, Face
from router.faces.ollama.ollama_api import OLLAMA_FACE
from router.faces.openai.openai_api import OPENAI_FACE
from router.faces.openapi import describe
from router.faces.responses.responses import RESPONSES_FACE
from router.gateway import Gateway
from router.http.api import OPENAI, api_of, error_response, json_response
from router.http.middleware import BUDGET, REQUEST_ID, Gate, RequestId
from router.http.sse import EventStream

MAX_HEAD_BYTES = 64 * 1024
PREFIX = "/models/"
_WHERE_TO_LOOK = "APIs begin at /v1 and /api, /openapi.json lists them, / is a page for people"


async def health(gateway: Gateway, request: Request) -> Response:
    return json_response({"status": "ok"})


async def ready(gateway: Gateway, request: Request) -> Response:
    is_ready = gateway.ready()
    status = {"ready": is_ready, "reason": not_ready(gateway), "degraded": degraded(gateway)}
    return json_response(status, status=200 if is_ready else 503)


async def metrics(gateway: Gateway, request: Request) -> Response:
    ports = gateway.replica_ports
    if ports and request.scope["server"][1] not in ports:
        raise NotFound(
            "Every gateway process counts for itself, and this port leads to any of them: scrape the port of each: "
            + ", ".join(map(str, ports))
        )
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(gateway.scraped or gateway.metrics.registry), media_type=content_type)


_PAGES = Face(
    endpoints=(
        Endpoint("GET", "/", page, "The cluster in a browser", key=""),
        Endpoint("GET", "/health", health, "The process lives", key=""),
        Endpoint("GET", "/ready", ready, "Whether a request would be served: 200 or 503", key=""),
        Endpoint("GET", "/metrics", metrics, "For Prometheus", key=""),
    )
)
FACES: Sequence[Face] = (
    OPENAI_FACE, RESPONSES_FACE, ANTHROPIC_FACE, OLLAMA_FACE, BATCHES_FACE, MESSAGE_BATCHES_FACE, ADMIN_FACE, _PAGES,
)  # fmt: skip

_APIS = tuple(dict.fromkeys(face.api for face in FACES if face.api is not OPENAI))
"""Paths whose answers are not in OpenAI's form."""
_WITH_KEY = tuple(
    {
        re.sub(r"^(/[^/]+/?).*", r"\1", endpoint.path)
        for face in FACES
        for endpoint in face.endpoints
        if endpoint.key == "client"
    }
)


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
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in (endpoint for face in FACES for endpoint in face.endpoints):
        by_path.setdefault(endpoint.path, []).append(endpoint)
    app.router.routes[:0] = [  # before /openapi.json: routes are matched in their order
        Route(path, _Answers(gateway, endpoints), methods=[endpoint.method for endpoint in endpoints])
        for path, endpoints in by_path.items()
    ]
    app.add_exception_handler(BatonError, _refused)
    app.add_exception_handler(HTTPException, _unrouted)

    @cache
    def described(needs_key: bool, needs_admin_key: bool) -> dict[str, Any]:
        models = [one.card.name for one in gateway.each]
        return describe(app, FACES, models, needs_key=needs_key, needs_admin_key=needs_admin_key)

    def document() -> dict[str, Any]:
        roster = gateway.access.roster
        return described(not roster.is_open, bool(roster.admin_keys))

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way of changing it
    return app


def create_models_app(gateways: Sequence[Gateway], registry: CollectorRegistry | None = None) -> ASGIApp:
    """Serves several models. The first one answers requests without a model; `registry` has the metrics of all. Raises
    Misconfigured if two have one name."""
    if len(gateways) == 1:
        return create_app(gateways[0])
    names = [gateway.card.name for gateway in gateways]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Misconfigured(f"two models are called {twice!r}: give each a name of its own", param="model")
    apps = {gateway.card.name: create_app(gateway) for gateway in beside_each_other(gateways)}
    return ModelsApp(create_app(front_of(gateways, registry)), apps)


def beside_each_other(gateways: Sequence[Gateway]) -> list[Gateway]:
    return [own.among(gateways) for own in gateways]


def front_of(gateways: Sequence[Gateway], registry: CollectorRegistry | None = None) -> Gateway:
    return replace(gateways[0], models=tuple(gateways), scraped=registry) if len(gateways) > 1 else gateways[0]


class ModelsApp:
    """Picks the application by the path: `/models/NAME/` and what is below is the model's own."""

    def __init__(self, front: ASGIApp, apps: Mapping[str, ASGIApp]) -> None:
        self._front = front
        self._names = tuple(apps)
        longest_first = sorted(apps, key=len, reverse=True)  # a name may have a "/" in it
        self._apps = [(f"{PREFIX}{name}", apps[name]) for name in longest_first]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(PREFIX):
            for root, app in self._apps:
                rest = path.removeprefix(root)
                if not rest and path == root:
                    await RedirectResponse(f"{root}/")(scope, receive, send)  # the page's addresses are relative
                    return
                if rest != path and rest.startswith("/"):
                    await app(dict(scope, path=rest, raw_path=rest.encode()), receive, send)
                    return
            name = path.removeprefix(PREFIX).partition("/")[0][:100]
            served = listed([f"'{model}'" for model in self._names])
            missing = UnknownModel(f"The model '{name}' does not exist: this server serves {served}", param="model")
            await error_response(missing, api_of(scope))(scope, receive, send)
            return
        await self._front(scope, receive, send)


def _layers(gateway: Gateway) -> list[Middleware]:
    http = gateway.http
    layers = [
        Middleware(RequestId, apis=_APIS),
        Middleware(
            Gate,
            access=gateway.access,
            paths=_WITH_KEY,
            max_head_bytes=MAX_HEAD_BYTES,
            max_bytes=http.max_body_bytes,
            timeout_s=http.body_timeout_s,
            uploads=_uploads(gateway),
            origins=http.origins,
            hosts=http.names,
        ),
    ]
    if http.origins:
        # First: a browser's preflight has no key, and must be able to read a refusal.
        across = Middleware(
            CORSMiddleware,
            allow_origins=http.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, BUDGET, "request-id", "x-request-id", IGNORED, "retry-after", "retry-after-ms"],
        )
        layers.insert(0, across)
    return layers


def _uploads(gateway: Gateway) -> Mapping[str, int]:
    """Returns the size limits of paths with large bodies, including a form's overhead."""
    if gateway.batches is None:
        return {}
    paths = (endpoint.path for face in FACES for endpoint in face.endpoints if endpoint.is_upload)
    return dict.fromkeys(paths, gateway.batches.max_file_bytes + MAX_HEAD_BYTES)


class _Answers:
    """The answers at one path, by method. An ASGI application: what Starlette and FastAPI put round a function costs as
    much as a request's validation."""

    def __init__(self, gateway: Gateway, endpoints: Sequence[Endpoint]) -> None:
        self._gateway = gateway
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
        self._endpoints |= {"HEAD": self._endpoints["GET"]} if "GET" in self._endpoints else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, endpoint, request = self._gateway, self._endpoints[scope["method"]], Request(scope, receive, send)
        if endpoint.key == "admin":
            gateway.access.check_admin(request.headers.get("authorization"))
        if not endpoint.track:
            await (await endpoint.answer(gateway, request))(scope, receive, send)
            return
        track = scope["state"]["track"] = gateway.metrics.track(endpoint.track)
        try:
            response = await endpoint.answer(gateway, request)
        except BaseException as error:
            track.finish(error)
            raise
        if not isinstance(response, EventStream):  # a stream finishes its track itself, when it ends
            track.finish()
        await response(scope, receive, send)


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
        absent = (pair for face in FACES for pair in face.absent.items())
        why = next((why for prefix, why in absent if path.startswith(prefix)), _WHERE_TO_LOOK)
        refusal = NotFound(f"There is nothing at {path}: {why}")
    else:
        refusal = InvalidRequest(str(error.detail))
    return json_response(api_of(request.scope).error_body(refusal), status=error.status_code, headers=dict(headers))
