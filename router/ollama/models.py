"""GET /api/tags, /api/ps and /api/version, POST /api/show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway
from router.http.body import read_body
from router.http.errors import json_response
from router.ollama.schema import OllamaShowBody

SPOKEN_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
_LATEST = ":latest"
NEVER = "2318-11-10T23:47:16Z"  # what Ollama has for a model that stays


def gateway_of(gateway: Gateway, name: str) -> Gateway:
    """The gateway of requests to this model. Clients put a tag behind a name without one. Raises UnknownModel."""
    return gateway.serving(name if gateway.serves(name) else name.removesuffix(_LATEST))


async def tags(gateway: Gateway) -> Response:
    """Each model and its adapters."""
    models = [
        _model(one.serving(name)) | {"modified_at": _modified(one)}
        for one in gateway.each
        for name in (one.card.name, *one.fleet.adapters())
    ]
    return json_response({"models": models})


async def loaded(gateway: Gateway) -> Response:
    """The models that are served, which no time unloads."""
    models = [
        _model(one) | {"size_vram": 0, "expires_at": NEVER, "context_length": one.card.max_model_len}
        for one in (known.serving(known.card.name) for known in gateway.each)
        if one.ready()
    ]
    return json_response({"models": models})


def _model(gateway: Gateway) -> dict[str, Any]:
    card = gateway.card
    return {"name": card.name, "model": card.name, "size": 0, "digest": gateway.fingerprint, "details": _details()}


async def show(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, OllamaShowBody, gateway.widest)
    gateway = gateway_of(gateway, body.model)
    context = {"general.architecture": "baton", "baton.context_length": gateway.card.max_model_len}
    return json_response(
        {
            "modelfile": "", "parameters": "", "template": "", "modified_at": _modified(gateway),
            "details": _details(), "model_info": context,
            "capabilities": [
                "completion",
                *(["tools"] if gateway.has_tools else []),
                *(["thinking"] if gateway.reasoning is not None else []),
            ],
        }
    )  # fmt: skip


def _modified(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.card.created, UTC).isoformat().replace("+00:00", "Z")


def _details() -> dict[str, Any]:
    """Ollama's description of a file; the gateway knows none of it."""
    return {
        "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
