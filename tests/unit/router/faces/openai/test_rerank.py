"""Documents by their relevance to a query, and scores of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers.models import WordLevel

from protos.values import FinishReason, Logprobs, TokenLogprob
from router.jobs import Job, TokenDelta
from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted import Scripted, byte_level, make_gateway, saying, serving, with_card

DOCUMENTS = ["fox", "fox fox fox fox", "fox fox"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """It has tokens for yes and no."""
    backend = type(byte_level().backend).from_str(byte_level().backend.to_str())
    backend.add_tokens(["yes", "no"])
    return Tokenizer(backend, named_tokens=byte_level().named_tokens)


def judged(job: Job) -> list[TokenDelta]:
    """The longer a prompt, the likelier is yes."""
    yes, no = job.sampling.label_token_ids
    logprobs = Logprobs(
        chosen=TokenLogprob(token_id=5, logprob=-0.1),
        top=(TokenLogprob(token_id=yes, logprob=-100 / len(job.prompt_ids)), TokenLogprob(token_id=no, logprob=-1.0)),
    )
    return [TokenDelta(token_ids=(5,), logprobs=(logprobs,), finish_reason=FinishReason.LENGTH)]


async def replies(tokenizer: Tokenizer, path: str, *bodies: dict[str, Any], **card: Any) -> tuple[list[Any], Scripted]:
    generate = Scripted(judged if not card else saying(""))
    gateway = make_gateway(generate, tokenizer=tokenizer, max_body_bytes=30_000)
    gateway = with_card(gateway, **{"max_model_len": 512, "vocab_size": 1024} | card)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        return [await http.post(path, json={"model": "tiny"} | body) for body in bodies], generate


async def test_documents_come_back_best_first(tokenizer: Tokenizer) -> None:
    asked = {"query": "how many?", "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1], "id": 7}, DOCUMENTS[2]]}
    some = {"top_n": 1, "return_documents": False}
    [whole, best, every], generate = await replies(
        tokenizer, "/v1/rerank", asked, asked | some, asked | {"top_n": 0, "truncate_prompt_tokens": None}
    )
    results = whole.json()["results"]
    assert results[0]["index"] == 1
    assert [row["document"]["text"] for row in results] == [DOCUMENTS[row["index"]] for row in results]
    assert [row["relevance_score"] for row in results] == sorted([row["relevance_score"] for row in results])[::-1]
    assert [sorted(row) for row in best.json()["results"]] == [["index", "relevance_score"]]
    assert every.json()["results"] == results
    num_tokens = sum(len(job.prompt_ids) for job in generate.jobs[:3])
    assert whole.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("first", "second", "num_scores"),
    [("a", "b", 1), ("a", ["b", "c"], 2), (["a", "b"], "c", 2), (["a", "b"], ["c", "d"], 2), (["a"], ["b", "c"], 2)],
)
async def test_pairs_have_a_score_each(
    tokenizer: Tokenizer, first: str | Sequence[str], second: str | Sequence[str], num_scores: int
) -> None:
    [reply], generate = await replies(tokenizer, "/v1/score", {"text_1": first, "text_2": second})
    assert [job.request_id for job in generate.jobs] == [f"{reply.json()['id']}-{n}" for n in range(num_scores)]
    assert [row["index"] for row in reply.json()["data"]] == list(range(num_scores))
    assert all(0 < row["score"] < 1 for row in reply.json()["data"])
    assert len(generate.jobs) == num_scores


async def test_an_embedder_compares_vectors(tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"query": "q", "documents": ["q", "d", "d"]}
    [reply, refused, raw, chosen], generate = await replies(
        tokenizer, "/v1/rerank", asked, asked | {"instruction": "find"}, asked | {"use_activation": False},
        asked | {"method": "yes_no"}, is_embedder=True,
    )  # fmt: skip
    assert [row["relevance_score"] for row in reply.json()["results"]] == pytest.approx([1.0] * 3)
    assert [row["index"] for row in reply.json()["results"]] == [0, 1, 2], "of equal ones the first is first"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")
    assert (raw.status_code, raw.json()["error"]["param"]) == (400, "use_activation")
    assert generate.jobs[0].request_id == f"{reply.json()['id']}-0"
    assert [job.sampling.pooling for job in generate.jobs[:2]] == ["last"] * 2, "equal texts are computed once"
    assert (chosen.status_code, chosen.json()["error"]["code"]) == (503, "unavailable"), "its worker knows no labels"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["d"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["d", 5]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["d", {"title": "x"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "q", "documents": ["d", {"text": 5}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "q", "documents": ["d", "e" * 400]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["d", "e" * 9999]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["d", "d", "e" * 600], "method": "embedding"}, "documents[2]"),
        ("/v1/rerank", {"query": "q" * 600, "documents": ["d", "e"], "method": "embedding"}, "query"),
        ("/v1/rerank", {"query": "q" * 600, "documents": ["d", "e"]}, "query"),
        ("/v1/score", {"text_1": "q", "text_2": ["d", "e" * 400]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["d", "e" * 400], "text_2": "q"}, "text_1[1]"),
        ("/v1/score", {"text_1": ["d", "f"], "text_2": ["q", "e" * 600], "method": "embedding"}, "text_2[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["d" * 9999]}, "documents"),
        ("/v1/rerank", {"query": "q" * 100, "documents": ["d"] * 299}, "documents"),
        ("/v1/score", {"text_1": "q", "text_2": ["d"] * 299, "instruction": "i" * 100}, "text_2"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "return_embeddings": True}, "return_embeddings"),
        ("/v1/rerank", {"documents": ["d"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "texts": 4}, "texts"),
    ],
)  # fmt: skip
async def test_what_cannot_be_ranked_is_named(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str
) -> None:
    [reply], generate = await replies(tokenizer, path, body)
    if len(body.get("documents", ())) > 2048:
        assert "2049" in reply.json()["error"]["message"]
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not generate.jobs


async def test_a_tokenizer_without_yes_and_no_is_named(tokenizer: Tokenizer) -> None:
    words = tokenizers.Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words.decoder = tokenizers.decoders.Fuse()
    unknown, beyond = Tokenizer(words, named_tokens={"eos_token": "?"}), tokenizer.backend.get_vocab_size() - 1
    for each, size in ((byte_level(), 1024), (unknown, 1024), (tokenizer, beyond)):
        [reply], _ = await replies(each, "/v1/rerank", {"query": "q", "documents": ["d"]}, vocab_size=size)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
