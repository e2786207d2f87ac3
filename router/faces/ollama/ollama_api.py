"""The endpoints of Ollama's API, its errors, `{"error": message}`, and its streams: lines of JSON, which have no room
for comments."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError
from protos.event_loop import loop_time
from router.faces.conversation.parts import Ignored
from router.faces.endpoint import Endpoint, Face
from router.faces.ollama.answers import chat, generate
from router.faces.ollama.ollama_bodies import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router.faces.openai.embeddings import MAX_DIMENSIONS, vectors_of
from router.faces.openai.openai_api import stored_as
from router.gateway import Gateway
from router.http.api import Api, json_line, json_response, retry_after
from router.http.body import FirstWrong, OpenBody
from router.text.sampling_request import SamplingRequest


class OllamaEmbedBody(OpenBody):
    model: str = Field(description="the name of a served model")
    input: str | Annotated[list[str], FirstWrong()] = Field(description="a string or a list of strings")
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS, description="an integer of at least 1")


class OllamaEmbeddingsBody(OpenBody):
    model: str = Field(description="the name of a served model")
    prompt: str = Field(description="a string")


async def ollama_vectors(gateway: Gateway, request: Request, body: OllamaEmbedBody) -> Response:
    begun_s = loop_time()
    _, vectors, usage = await vectors_of(gateway, request, body.input, _asked(gateway), dimensions=body.dimensions)
    answer = {
        "model": gateway.card.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": int((loop_time() - begun_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }
    return json_response(answer, headers=_ignored(body))


async def ollama_vector(gateway: Gateway, request: Request, body: OllamaEmbeddingsBody) -> Response:
    _, [vector], _ = await vectors_of(gateway, request, body.prompt, _asked(gateway, prompt="prompt"))
    return json_response({"embedding": vector.tolist()}, headers=_ignored(body))


def _asked(gateway: Gateway, *, prompt: str = "input") -> SamplingRequest:
    return SamplingRequest(silent=True, pooling=gateway.texts.config.pooling, names={"prompt": prompt})


def _ignored(body: OpenBody) -> dict[str, str]:
    ignored = Ignored()
    ignored.add_unlisted(body)
    return ignored.headers()


SPOKEN_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
NEVER = "2318-11-10T23:47:16Z"  # Ollama's value for a model that stays loaded


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


async def show(gateway: Gateway, request: Request, body: OllamaShowBody) -> Response:
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


def error_body(error: BatonError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Api(
    name="ollama",
    paths=("/api/",),
    error_body=error_body,
    error_event=lambda error: json_line(error_body(error) | retry_after(error)),
    keep_alive=b"",  # begins the response; an empty line would stop clients
    stream_type=b"application/x-ndjson",
    model_tag=":latest",
)

_MODELS_STAY = "models are given when the server starts (--model); adapters come and go with `baton adapter`"
OLLAMA_FACE = Face(
    api=OLLAMA,
    endpoints=(
        Endpoint(
            "POST", "/api/chat", chat, "An answer to a conversation, as lines or whole, in the form of Ollama's API",
            track="ollama.chat", body=OllamaChatBody,
        ),
        Endpoint(
            "POST", "/api/generate", generate, "An answer to a prompt, as lines or whole, in the form of Ollama's API",
            track="ollama.generate", body=OllamaGenerateBody,
        ),
        Endpoint("POST", "/api/embed", ollama_vectors, "Vectors of texts", track="ollama.embed", body=OllamaEmbedBody),
        Endpoint(
            "POST", "/api/embeddings", ollama_vector, "The vector of a text, in Ollama's older form",
            track="ollama.embed", body=OllamaEmbeddingsBody,
        ),
        Endpoint("GET", "/api/tags", tags, "The models served"),
        Endpoint("GET", "/api/ps", loaded, "The models loaded"),
        Endpoint("POST", "/api/show", show, "One model", body=OllamaShowBody),
        Endpoint("GET", "/api/version", spoken_version, "The version of Ollama whose API this is"),
    ),
    absent={f"/api/{verb}": _MODELS_STAY for verb in ("pull", "push", "create", "copy", "delete", "blobs")},
)  # fmt: skip
