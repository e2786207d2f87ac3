"""The endpoints of OpenAI's API, and those of vLLM's beside it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest
from router.faces.endpoint import Endpoint, Face
from router.faces.openai.chat_completions import chat_completions
from router.faces.openai.completions import completions
from router.faces.openai.embeddings import EmbeddingBody, embeddings
from router.faces.openai.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.faces.openai.rerank import RerankBody, ScoreBody, rerank, score
from router.gateway import Gateway
from router.http.api import json_response


async def tokenize(gateway: Gateway, request: Request, body: TokenizeBody) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'", param="prompt")
    if body.messages is not None:
        tools = [tool.function.shown() for tool in body.tools or ()]
        ids = await gateway.texts.encode_chat(
            [message.to_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            tools=tools,
        )
    else:
        [ids] = await gateway.texts.encode(
            [body.prompt or ""],
            add_special_tokens=body.add_special_tokens,
            split_special_tokens=body.split_special_tokens,
        )
    reply = {"count": len(ids), "max_model_len": gateway.card.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        reply["token_strs"] = [gateway.texts.tokenizer.token_text(one) for one in ids]
    return json_response(reply)


async def detokenize(gateway: Gateway, request: Request, body: DetokenizeBody) -> Response:
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id < gateway.card.vocab_size:
            allowed = f"token ids between 0 and {gateway.card.vocab_size - 1}"
            raise InvalidRequest(f"'tokens' has the value {token_id}: it must be made of {allowed}", param="tokens")
    return json_response({"prompt": await gateway.texts.tokenizer.text_of(body.tokens)})


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


OPENAI_FACE = Face(
    endpoints=(
        Endpoint(
            "POST", "/v1/chat/completions", chat_completions,
            "An answer to a conversation, whole or as events, in the form of OpenAI's chat completions",
            track="chat.completions", body=ChatBody,
        ),
        Endpoint(
            "POST", "/v1/completions", completions,
            "Continuations of prompts, whole or as events, in the form of OpenAI's completions",
            track="completions", body=CompletionBody,
        ),
        Endpoint(
            "POST", "/v1/embeddings", embeddings, "Vectors of prompts, in the form of OpenAI's embeddings",
            track="embeddings", body=EmbeddingBody,
        ),
        Endpoint(
            "POST", "/v1/rerank", rerank, "Documents by their relevance to a query, in the form of Jina's and Cohere's",
            track="rerank", body=RerankBody,
        ),
        Endpoint(
            "POST", "/v1/score", score, "How well pairs of texts fit, in the form of vLLM's score",
            track="score", body=ScoreBody,
        ),
        Endpoint("GET", "/v1/models", list_models, "The models served, in the forms of OpenAI's and Anthropic's lists"),
        Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "One model"),
        Endpoint("POST", "/tokenize", tokenize, "The tokens of a prompt or a conversation", body=TokenizeBody),
        Endpoint("POST", "/detokenize", detokenize, "The text of tokens", body=DetokenizeBody),
    )
)  # fmt: skip
