"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from router.gateway import Gateway


def model_list(gateway: Gateway) -> dict[str, Any]:
    """Each model, its aliases (those with a "*" are not names), and its adapters."""
    names = dict.fromkeys(name for one in gateway.each for name in _names(one))
    return {"object": "list", "data": [one_model(gateway, name) for name in names]}


def _names(gateway: Gateway) -> tuple[str, ...]:
    aliases = [alias for alias in gateway.model_aliases if "*" not in alias and alias != gateway.card.name]
    return (gateway.card.name, *aliases, *gateway.fleet.adapters())


def one_model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Raises UnknownModel."""
    return _model(gateway.serving(name), name)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """OpenAI's model object, vLLM's `max_model_len`, and how the workers hold the weights, once one has reported it."""
    card = gateway.card
    reported = (worker.info.weights for worker in gateway.fleet.status() if worker.info is not None)
    return {
        "id": name, "object": "model", "created": card.created, "owned_by": "baton", "root": card.parent or card.name,
        "parent": card.parent, "max_model_len": card.max_model_len,
        "weights": next((weights for weights in reported if weights), None),
    }  # fmt: skip
