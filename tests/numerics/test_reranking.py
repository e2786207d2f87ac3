"""Scores of documents are those of Qwen3-Reranker's model card, computed by transformers from random weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.jobs import Job, TokenDelta
from router.text.chat_template import ChatTemplate
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer
from tests.numerics.conftest import Checkpoint
from tests.numerics.engines import answer, colocated
from tests.unit.router.scripted import make_gateway, serving
from workers.worker_config import WorkerConfig

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
OF_QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OF_PAIRS = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Given a web search query, retrieve relevant passages that answer the query") -%}'
    '{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}'
    '{%- set text = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}'
    f"{PREFIX}<Instruct>: {{{{ instruction }}}}\n<Query>: {{{{ query }}}}\n<Document>: {{{{ text }}}}{SUFFIX}\n"
)
QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts two bodies.", "yes", "The capital of China"]


def tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["yes", "no"] * 50 + DOCUMENTS, trainer)
    return backend


@pytest.mark.parametrize("template", [OF_QWEN3, OF_PAIRS], ids=["conversations", "pairs"])
@pytest.mark.parametrize("instruction", [None, "Find a city"])
async def test_documents_have_the_scores_of_transformers(
    checkpoint: Checkpoint, template: str, instruction: str | None
) -> None:
    folder, oracle = checkpoint("qwen3", vocab_size=304, max_position_embeddings=1024)
    backend = tokenizer()
    yes, no = backend.token_to_id("yes"), backend.token_to_id("no")
    asked = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    odds = []
    for document in DOCUMENTS:
        text = f"{PREFIX}<Instruct>: {asked}\n<Query>: {QUERY}\n<Document>: {document}{SUFFIX}"
        with torch.no_grad():
            logits_V = oracle(torch.tensor([backend.encode(text).ids])).logits[0, -1]
        odds.append(float(logits_V[yes] - logits_V[no]))

    with colocated(WorkerConfig(model=str(folder), device="cpu", num_blocks=256, prefill_chunk=64)) as engine:

        async def generate(job: Job) -> AsyncGenerator[TokenDelta, None]:
            [whole] = answer(engine, [job.prompt_ids], job.sampling)
            for update in whole.updates:
                yield TokenDelta(
                    token_ids=update.token_ids, logprobs=update.logprobs, finish_reason=update.finish_reason
                )

        texts: dict[str, Any] = {
            "tokenizer": Tokenizer(backend, named_tokens={"eos_token": MARKS[1]}),
            "card": ModelCard(name="ranker", max_model_len=1024, vocab_size=304),
            "template": ChatTemplate(template, added_tokens=dict.fromkeys(MARKS, True)),
        }
        async with serving(make_gateway(generate, **texts)) as url, httpx.AsyncClient(base_url=url) as http:
            body = {"model": "ranker"} | ({"instruction": instruction} if instruction else {})
            pairs = body | {"text_1": QUERY, "text_2": DOCUMENTS}
            scores = (await http.post("/v1/score", json=pairs)).json()["data"]
            raw = (await http.post("/v1/score", json=pairs | {"use_activation": False})).json()["data"]
            ranked = (await http.post("/v1/rerank", json=body | {"query": QUERY, "documents": DOCUMENTS})).json()
    likely = torch.tensor(odds).sigmoid().tolist()
    assert [row["score"] for row in scores] == pytest.approx(likely, abs=1e-5)
    assert [row["score"] for row in raw] == pytest.approx(odds, abs=1e-4)
    best = sorted(range(len(odds)), key=lambda index: -odds[index])
    assert [row["index"] for row in ranked["results"]] == best
    assert len(set(best)) == len(DOCUMENTS)
