"""The endpoints of Ollama's API, its errors, `{"error": message}`, and its streams: lines of JSON, which have no room
for comments."""

from __future__ import annotations

from typing import Any

from protos.errors import BatonError
from router.faces.endpoint import Endpoint, Face
from router.faces.ollama.answers import chat, generate
from router.faces.ollama.embed import OllamaEmbedBody, OllamaEmbeddingsBody, ollama_vector, ollama_vectors
from router.faces.ollama.model_lists import loaded, show, spoken_version, tags
from router.faces.ollama.ollama_bodies import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router.http.api import Api, json_line, retry_after


def error_body(error: BatonError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Api(
    name="ollama",
    paths=("/api/",),
    error_body=error_body,
    error_event=lambda error: json_line(error_body(error) | retry_after(error)),
    keep_alive=b"",  # the response begins; a line without an answer would stop its clients
    stream_type=b"application/x-ndjson",
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
