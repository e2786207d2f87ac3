"""POST /api/embed, vectors of texts, and /api/embeddings, the older path of one vector."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.event_loop import loop_time
from router.faces.conversation.parts import Ignored
from router.faces.ollama.model_lists import gateway_of
from router.faces.openai.embeddings import MAX_DIMENSIONS, Vector, vectors_of
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import FirstWrong, OpenBody, read_body, with_bound
from router.http.middleware import track_of
from router.http.sse import while_connected
from router.request_metrics import Track
from router.text.sampling_request import SamplingRequest
from router.text.text_stream import Usage


class OllamaEmbedBody(OpenBody):
    model: str = Field(description="the name of a served model")
    input: str | Annotated[list[str], FirstWrong()] = Field(description="a string or a list of strings")
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS, description="an integer of at least 1")


class OllamaEmbeddingsBody(OpenBody):
    model: str = Field(description="the name of a served model")
    prompt: str = Field(description="a string")


async def ollama_vectors(gateway: Gateway, request: Request) -> Response:
    track = track_of(request)
    body = await read_body(request, OllamaEmbedBody, gateway.widest)
    gateway, begun_s = gateway_of(gateway, body.model, track), loop_time()
    vectors, usage = await _vectors(gateway, request, track, body.input, "input", dimensions=body.dimensions)
    answer = {
        "model": gateway.card.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": int((loop_time() - begun_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }
    return json_response(answer, headers=_ignored(body))


async def ollama_vector(gateway: Gateway, request: Request) -> Response:
    track = track_of(request)
    body = await read_body(request, OllamaEmbeddingsBody, gateway.widest)
    gateway = gateway_of(gateway, body.model, track)
    [vector], _ = await _vectors(gateway, request, track, body.prompt, "prompt")
    return json_response({"embedding": vector.tolist()}, headers=_ignored(body))


async def _vectors(
    gateway: Gateway,
    request: Request,
    track: Track,
    texts: str | list[str],
    param: str,
    *,
    dimensions: int | None = None,
) -> tuple[list[Vector], Usage]:
    asked = SamplingRequest(silent=True, pooling=gateway.texts.config.pooling, names={"prompt": param})
    work = vectors_of(gateway, request, track, texts, with_bound(asked, request), dimensions=dimensions)
    return await while_connected(request.scope, request.receive, work)


def _ignored(body: OpenBody) -> dict[str, str]:
    ignored = Ignored()
    ignored.add_unlisted(body)
    return ignored.headers()
