"""POST /v1/rerank and /v1/score, as Jina, Cohere and vLLM have them: how well a document answers a query.

- yes_no: P(yes) / (P(yes) + P(no)) of the answer's first token, as Qwen3-Reranker is asked
- embedding: the cosine of the two texts' vectors
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, Unavailable, UnsupportedParameter
from router.faces.conversation.turn import text_request
from router.faces.openai.embeddings import SilentBody, vectors_of
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import FirstWrong, Harmless, OpenBody, at_most, never, one_of
from router.http.middleware import track_of
from router.http.sse import while_connected
from router.text.sampling_request import MAX_CHOICES
from router.text.text_stream import TextDelta, Usage, collect

_WHOLE = "texts are not cut here"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
"""The prompt of Qwen3-Reranker's model card, for templates that are of conversations."""
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_NO_THINKING = {"enable_thinking": False}
_MOST_ODDS = 700.0  # math.exp overflows beyond

_Texts = Annotated[list[str], FirstWrong(), at_most(MAX_CHOICES), Field(min_length=1)]


class RankedDocument(OpenBody):
    text: str = Field(description="a string")


class _RankingBody(SilentBody):
    """`instruction` and `method` are Baton's own, `use_activation` is vLLM's."""

    prefix: ClassVar[str] = "score"
    harmless: ClassVar[Mapping[str, Harmless]] = {
        "encoding_format": one_of("float", why="scores are numbers"),
        "label_token_ids": never("the model's yes and no are compared"),
        "max_chunks_per_doc": one_of(1, why=_WHOLE),
        "max_tokens_per_doc": never(_WHOLE),
        "mm_processor_kwargs": one_of({}, why="documents are texts here"),
        "rank_fields": one_of(["text"], why="a document is its text"),
        "return_embeddings": one_of(False, why="/v1/embeddings gives vectors"),
        "truncate_prompt_tokens": never(_WHOLE),
        "truncation": one_of(False, why=_WHOLE),
    }

    method: Literal["yes_no", "embedding"] | None = Field(default=None, description="yes_no or embedding")
    instruction: str | None = Field(default=None, description="a string")
    use_activation: bool | None = Field(default=None, description="true or false: false gives log-odds of yes to no")

    def by_embedding(self, gateway: Gateway) -> bool:
        """Raises UnsupportedParameter for one that has no effect on a cosine."""
        is_embedding = self.method == "embedding" or (self.method is None and gateway.card.is_embedder)
        for name, value in (("instruction", self.instruction), ("use_activation", self.use_activation is False)):
            if is_embedding and value:
                problem = f"'{name}' has no effect on the cosine of vectors"
                raise UnsupportedParameter(f'{problem}: leave it out, or set "method": "yes_no"', param=name)
        return is_embedding


class RerankBody(_RankingBody):
    prefix: ClassVar[str] = "rerank"
    query: str = Field(description="a string")
    documents: Annotated[list[str | RankedDocument], FirstWrong(), at_most(MAX_CHOICES)] = Field(
        min_length=1,
        max_length=MAX_CHOICES,
        description=f"a list of 1 to {MAX_CHOICES} strings, or objects with a text",
    )
    top_n: int | None = Field(default=None, ge=0, description="an integer of at least 0; 0 means all")
    return_documents: bool | None = Field(default=None, description="true or false")


class ScoreBody(_RankingBody):
    text_1: str | _Texts = Field(description=f"a string or a list of 1 to {MAX_CHOICES} strings")
    text_2: str | _Texts = Field(description=f"a string or a list of 1 to {MAX_CHOICES} strings, as many as in text_1")

    def pairs(self) -> list[tuple[str, str]]:
        """One text is paired with each of the other side. Raises InvalidRequest."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        elif len(second) == 1:
            second = second * len(first)
        if len(first) != len(second):
            problem = f"'text_2' has {len(second)} strings and 'text_1' {len(first)}"
            raise InvalidRequest(f"{problem}: give as many, or a single one on one side", param="text_2")
        return list(zip(first, second, strict=True))


async def rerank(gateway: Gateway, request: Request, body: RerankBody) -> Response:
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    pairs = [(body.query, document) for document in documents]
    request_id, scores, usage = await _scores(gateway, request, body, pairs, ("query", "documents"))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        {"index": index, "relevance_score": scores[index]} | ({"document": {"text": documents[index]}} if shows else {})
        for index in best
    ]
    return json_response({"id": request_id, "model": gateway.card.name, "results": results, "usage": _usage(usage)})


async def score(gateway: Gateway, request: Request, body: ScoreBody) -> Response:
    request_id, scores, usage = await _scores(gateway, request, body, body.pairs(), ("text_1", "text_2"))
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return json_response(
        {
            "id": request_id, "object": "list", "created": int(gateway.wall_clock()),
            "model": gateway.card.name, "data": data, "usage": _usage(usage),
        }
    )  # fmt: skip


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "completion_tokens": 0}


def _named(sides: tuple[str, str], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The parameter of each text."""
    names = dict[str, str]()
    for side, texts in zip(sides, zip(*pairs, strict=True), strict=True):
        is_list = len(set(texts)) > 1
        for index, text in enumerate(texts):
            names.setdefault(text, f"{side}[{index}]" if is_list else side)
    return names


async def _scores(
    gateway: Gateway, request: Request, body: _RankingBody, pairs: Sequence[tuple[str, str]], sides: tuple[str, str]
) -> tuple[str, list[float], Usage]:
    """The answer's id, and its scores. `sides` are the pairs' parameters. Raises InvalidRequest."""
    named, param = _named(sides, pairs), sides[1]
    if body.by_embedding(gateway):
        asked = body.asked(param, list(named.values()), pooling=gateway.texts.config.pooling)
        request_id, vectors, usage = await vectors_of(gateway, request, list(named), asked, prefix=body.prefix)
        vector_of = dict(zip(named, vectors, strict=True))
        return request_id, [float(vector_of[query] @ vector_of[document]) for query, document in pairs], usage
    labels, repeated = await _yes_and_no(gateway), body.instruction or ""
    num_chars = sum(len(repeated) + len(query) + len(document) for query, document in pairs)
    if num_chars > (most := gateway.http.max_body_bytes):  # a query is read with each document
        problem = f"'{param}' makes prompts of {num_chars} characters"
        raise InvalidRequest(f"{problem}: one request may make {most}, send fewer at a time", param=param)
    blamed = [named[max(pair, key=len)] for pair in pairs]
    asked = body.asked(param, blamed, temperature=0.0, logprobs=0, label_token_ids=labels)
    prompts = [await _prompt(gateway, *pair, body.instruction, name) for pair, name in zip(pairs, blamed, strict=True)]
    ask = text_request(gateway, request, body.prefix, asked, prompts)
    answer = collect(gateway.answer(ask, track_of(request)), ask)
    choices, usage = await while_connected(request.scope, request.receive, answer)
    odds = [_odds(choice, labels) for choice in choices]
    if body.use_activation is False:
        return ask.request_id, odds, usage
    return ask.request_id, [1 / (1 + math.exp(min(-value, _MOST_ODDS))) for value in odds], usage


async def _yes_and_no(gateway: Gateway) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    encoded = await gateway.texts.tokenizer.encode(["yes", "no"], add_special_tokens=False)
    single = {ids for ids in encoded if len(ids) == 1 and ids[0] < gateway.card.vocab_size}
    if len(single) < len(encoded):  # one id for both is that of an unknown word
        raise InvalidRequest(
            f"The tokenizer of '{gateway.card.name}' has no tokens for yes and no: rerank with another model, or with "
            '"method": "embedding"',
            param="model",
        )
    return tuple(token_id for [token_id] in encoded)


async def _prompt(gateway: Gateway, query: str, document: str, instruction: str | None, param: str) -> tuple[int, ...]:
    await asyncio.sleep(0)  # thousands of short prompts leave the event loop to others
    template, messages = gateway.texts.template, list[dict[str, Any]]()
    if template is not None and template.is_of_pairs:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        messages[:0] = [{"role": "system", "content": instruction}] if instruction else []
    else:
        asked = _USER.format(instruction=instruction or _INSTRUCTION, query=query, document=document)
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
    return await gateway.texts.encode_chat(messages, options=_NO_THINKING, param=param)


def _odds(choice: TextDelta, labels: tuple[int, ...]) -> float:
    """The logprob of yes less that of no. Raises Unavailable."""
    likely = {token.token_id: token.logprob for logprobs in choice.logprobs for token in logprobs.top}
    if not likely.keys() >= set(labels):
        raise Unavailable("The worker sent no logprobs of yes and no: it is of an older version of Baton")
    yes, no = (likely[token_id] for token_id in labels)
    return yes - no
