"""GET /api/tags, /api/ps and /api/version, POST /api/show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.faces.ollama.ollama_bodies import OllamaShowBody
from router.faces.openai.openai_api import stored_as
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import read_body
from router.request_metrics import Track

SPOKEN_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
_LATEST = ":latest"
NEVER = "2318-11-10T23:47:16Z"  # what Ollama has for a model that stays


def gateway_of(gateway: Gateway, name: str, track: Track | None = None) -> Gateway:
    """The gateway of requests to this model. Clients add a tag to a name without one. Raises UnknownModel."""
    return gateway.serving(name if gateway.serves(name) else name.removesuffix(_LATEST), track)


async def spoken_version(gateway: Gateway, request: Request) -> Response:
    return json_response({"version": SPOKEN_VERSION})


async def tags(gateway: Gateway, request: Request) -> Response:
    """Each model and its adapters."""
    models = [
        _model(one.serving(name)) | {"modified_at": _modified(one)}
        for one in gateway.each
        for name in (one.card.name, *one.fleet.adapters())
    ]
    return json_response({"models": models})


async def loaded(gateway: Gateway, request: Request) -> Response:
    """The models that are served, which no time unloads."""
    models = [
        _model(one) | {"size_vram": 0, "expires_at": NEVER, "context_length": one.card.max_model_len}
        for one in (known.serving(known.card.name) for known in gateway.each)
        if one.ready()
    ]
    return json_response({"models": models})


def _model(gateway: Gateway) -> dict[str, Any]:
    card = gateway.card
    return {
        "name": card.name, "model": card.name, "size": card.num_bytes, "digest": gateway.fingerprint,
        "details": _details(gateway),
    }  # fmt: skip


async def show(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, OllamaShowBody, gateway.widest)
    gateway = gateway_of(gateway, body.model)
    card, family = gateway.card, gateway.card.family or "baton"
    context = {"general.architecture": family, f"{family}.context_length": card.max_model_len}
    if card.vector_size:
        context[f"{family}.embedding_length"] = card.vector_size
    return json_response(
        {
            "modelfile": "", "parameters": "", "template": "", "modified_at": _modified(gateway),
            "details": _details(gateway), "model_info": context,
            "capabilities": [
                "completion",
                *(["tools"] if gateway.texts.has_tools else []),
                *(["thinking"] if gateway.texts.reasoning is not None else []),
            ],
        }
    )  # fmt: skip


def _modified(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.card.created, UTC).isoformat().replace("+00:00", "Z")


def _details(gateway: Gateway) -> dict[str, Any]:
    """Describes a model as Ollama does; unknown values are ""."""
    card, weights = gateway.card, stored_as(gateway) or ""
    return {
        "parent_model": card.parent or "", "format": "", "family": card.family,
        "families": [card.family] if card.family else [], "parameter_size": "",
        "quantization_level": weights.partition(",")[0],
    }  # fmt: skip
