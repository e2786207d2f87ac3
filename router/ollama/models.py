"""GET /api/tags and /api/version, POST /api/show."""

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


def check_name(gateway: Gateway, name: str) -> None:
    """Clients put a tag behind a name without one. Raises UnknownModel."""
    gateway.check_model(name if gateway.serves(name) else name.removesuffix(_LATEST))


async def tags(gateway: Gateway) -> Response:
    card = gateway.card
    model = {
        "name": card.name, "model": card.name, "modified_at": _modified(gateway), "size": 0,
        "digest": card.fingerprint, "details": _details(),
    }  # fmt: skip
    return json_response({"models": [model]})


async def show(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, OllamaShowBody, gateway.card)
    check_name(gateway, body.model)
    context = {"general.architecture": "baton", "baton.context_length": gateway.card.max_model_len}
    return json_response(
        {
            "modelfile": "", "parameters": "", "template": "", "modified_at": _modified(gateway),
            "details": _details(), "model_info": context,
            "capabilities": ["completion", *(["tools"] if gateway.has_tools else [])],
        }
    )  # fmt: skip


def _modified(gateway: Gateway) -> str:
    return datetime.fromtimestamp(gateway.card.created, UTC).isoformat().replace("+00:00", "Z")


def _details() -> dict[str, Any]:
    """Ollama's description of a file; the gateway knows none of it."""
    return {
        "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
