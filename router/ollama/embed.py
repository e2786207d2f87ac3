"""POST /api/embed: vectors of texts."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from protos.event_loop import loop_time
from router.conversation.parts import Ignored
from router.gateway import Gateway
from router.http.body import read_body, with_bound
from router.http.errors import json_response
from router.http.sse import while_connected
from router.http.validation import Body, FirstWrong
from router.metrics import Track
from router.ollama.models import gateway_of
from router.openai.embeddings import MAX_DIMENSIONS, vectors_of
from router.text.sampling_request import SamplingRequest


class OllamaEmbedBody(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(description="the name of a served model")
    input: str | Annotated[list[str], FirstWrong()] = Field(description="a string or a list of strings")
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS, description="an integer of at least 1")


async def ollama_vectors(gateway: Gateway, request: Request, track: Track) -> Response:
    body = await read_body(request, OllamaEmbedBody, gateway.widest)
    gateway = gateway_of(gateway, body.model)
    ignored, begun_s = Ignored(), loop_time()
    for name in body.model_extra or {}:
        ignored.add(name)
    asked = SamplingRequest(max_tokens=0, pooling=gateway.pooling, names={"prompt": "input"})
    sampling = with_bound(asked, request)
    work = vectors_of(gateway, request, track, body.input, sampling, dimensions=body.dimensions)
    vectors, usage = await while_connected(request.scope, request.receive, work)
    answer = {
        "model": gateway.card.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": int((loop_time() - begun_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }
    return json_response(answer, headers=ignored.headers())
