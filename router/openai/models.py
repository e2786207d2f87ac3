"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from router.gateway import Gateway


def model_list(gateway: Gateway) -> dict[str, Any]:
    return {"object": "list", "data": [_model(gateway)]}


def one_model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Raises UnknownModel."""
    gateway.check_model(name)
    return _model(gateway)


def _model(gateway: Gateway) -> dict[str, Any]:
    """OpenAI's model object, vLLM's `max_model_len`, and how the workers hold the weights, once one has reported it."""
    card = gateway.card
    reported = (worker.info.weights for worker in gateway.fleet.status() if worker.info is not None)
    return {
        "id": card.name, "object": "model", "created": card.created, "owned_by": "baton", "root": card.name,
        "parent": None, "max_model_len": card.max_model_len,
        "weights": next((weights for weights in reported if weights), None),
    }  # fmt: skip
