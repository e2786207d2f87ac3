"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway
from router.http.error_responses import json_response


async def list_models(gateway: Gateway, request: Request) -> Response:
    """Lists each model, its aliases without "*", and its adapters, as both OpenAI's and Anthropic's API do."""
    names = dict.fromkeys(name for one in gateway.each for name in _names(one))
    data = [_model(gateway.serving(name), name) for name in names]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data, "has_more": False} | ends)


def _names(gateway: Gateway) -> tuple[str, ...]:
    aliases = [alias for alias in gateway.card.aliases if "*" not in alias and alias != gateway.card.name]
    return (gateway.card.name, *aliases, *gateway.fleet.adapters())


async def retrieve_model(gateway: Gateway, request: Request) -> Response:
    """Raises UnknownModel."""
    name = request.path_params["name"]
    return json_response(_model(gateway.serving(name), name))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """OpenAI's model object with vLLM's `max_model_len`, the model's commit in the hub, the encoding of the weights
    once a worker has reported it, and the fields of Anthropic's object."""
    card = gateway.card
    return {
        "id": name, "object": "model", "created": card.created, "owned_by": "baton", "root": card.parent or card.name,
        "parent": card.parent, "max_model_len": card.max_model_len, "weights": stored_as(gateway),
        "hub": card.hub or None, "default_sampling": card.default_sampling, "type": "model", "display_name": name,
        "lifecycle": "active", "max_input_tokens": card.max_model_len,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
    }  # fmt: skip


def stored_as(gateway: Gateway) -> str | None:
    """The encoding of the weights on a worker; None before a worker has reported it."""
    reported = (worker.info.weights for worker in gateway.fleet.status() if worker.info is not None)
    return next((weights for weights in reported if weights), None)
