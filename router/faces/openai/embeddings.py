"""POST /v1/embeddings: vectors of prompts, by the last hidden state of a model or the mean of its hidden states."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest
from router.faces.conversation.turn import text_request
from router.faces.openai.completions import prompts_of
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Body, FirstWrong, ranged
from router.http.middleware import track_of
from router.http.sse import while_connected
from router.text.sampling_request import MAX_CHOICES, SamplingRequest
from router.text.text_stream import Usage, collect

MAX_DIMENSIONS = 65_536

Ids = Annotated[list[int], FirstWrong()]
Vector = NDArray[np.float32]


class SilentBody(Body):
    """A request whose prompts are computed and not answered. The last block is Baton's own."""

    model: str = Field(description="the name of a served model")
    user: str | None = Field(default=None, description="a string")

    priority: int | None = ranged("priority", "an integer")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256, description="1 to 256 characters")
    max_ttft_ms: float | None = ranged("max_ttft_ms", "a number of milliseconds")

    def asked(self, prompt: str, each: Sequence[str] = (), **more: Any) -> SamplingRequest:
        """`prompt`: the parameter that has the prompts, `each`: the names of each."""
        own = ("priority", "cache_salt", "max_ttft_ms")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        names = {"prompt": prompt} | {f"prompt[{index}]": name for index, name in enumerate(each)}
        return SamplingRequest(**given, **more, silent=True, names=names)


class EmbeddingBody(SilentBody):
    """`pooling` is Baton's own."""

    id_lists: ClassVar[tuple[str, ...]] = ("input",)

    input: str | Annotated[list[str], FirstWrong()] | Ids | Annotated[list[Ids], FirstWrong()] = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of token ids"
    )
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="float or base64")
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DIMENSIONS,
        description="an integer of at least 1, at most the size of the model's vectors",
    )
    pooling: Literal["last", "mean"] | None = Field(default=None, description="last or mean")


async def embeddings(gateway: Gateway, request: Request, body: EmbeddingBody) -> Response:
    sampling = body.asked("input", pooling=body.pooling or gateway.texts.config.pooling)
    _, vectors, usage = await vectors_of(gateway, request, body.input, sampling, dimensions=body.dimensions)
    is_base64 = body.encoding_format == "base64"
    return json_response(
        {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": gateway.card.name,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }
    )


async def vectors_of(
    gateway: Gateway,
    request: Request,
    given: str | Sequence[str | int | list[int]],
    sampling: SamplingRequest,
    *,
    dimensions: int | None = None,
    prefix: str = "embd",
) -> tuple[str, list[Vector], Usage]:
    """The request's id, which begins with `prefix`, and vectors of prompts, of length 1, cut to `dimensions`. Raises
    InvalidRequest."""
    if not given and not isinstance(given, str):
        raise InvalidRequest(f"'input' is an empty list: give 1 to {MAX_CHOICES} prompts", param="input")
    if size := gateway.card.vector_size:
        _check_dimensions(dimensions, size)
    prompts = await prompts_of(gateway, given, sampling)
    ask = text_request(gateway, request, prefix, sampling, [prompt.ids for prompt in prompts])
    answer = collect(gateway.answer(ask, track_of(request)), ask)
    found, usage = await while_connected(request.scope, request.receive, answer)
    return ask.request_id, [_vector(one.embedding, dimensions) for one in found], usage


def _vector(embedding: bytes, dimensions: int | None) -> Vector:
    vector = np.frombuffer(embedding, dtype=np.float32)
    _check_dimensions(dimensions, len(vector))
    vector = vector[:dimensions]
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)


def _check_dimensions(dimensions: int | None, size: int) -> None:
    """Raises InvalidRequest."""
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(f"'dimensions' is {dimensions}: the model's vectors have {size}", param="dimensions")
