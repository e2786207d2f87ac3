"""The demo model as a GGUF file: how much worse it predicts, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from protos.model_files.opening import open_model
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.gguf_models import convert
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
TEXTS = 6
"""texts of each held-out kind"""
NUM_BLOCKS = 160


def nats(run: PagedRun, texts: Sequence[Sequence[int]]) -> float:
    """Mean cross entropy of a token."""
    total, count = 0.0, 0
    for index, ids in enumerate(texts):
        with torch.no_grad():
            [logits] = run.step([(f"{index}", ids[:-1], len(ids) - 1)])
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return total / count


@cache
def held_out() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.load(open_model(DEMO))
    texts = json.loads((DEMO / "held_out.json").read_text())
    return tuple(tokenizer._encode([text], False)[0] for kind in ("source", "chat") for text in texts[kind][:TEXTS])


@cache
def float_nats() -> float:
    return nats(opened(DEMO), held_out())


def opened(path: Path) -> PagedRun:
    num_blocks = sum(-(-len(ids) // 8) for ids in held_out()) + NUM_BLOCKS
    return PagedRun(load_model(path), num_blocks=num_blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "others", "most"),
    [
        ("F16", {}, 1.0001),
        ("Q8_0", {}, 1.01),
        ("Q4_0", {}, 1.04),
        ("Q4_K", {"token_embd": "Q6_K", "attn_v": "Q6_K"}, 1.04),
    ],
)  # fmt: skip
def test_the_demo_model_is_unchanged(kind: str, others: dict[str, str], most: float, tmp_path: Path) -> None:
    path = convert(DEMO, tmp_path / "demo.gguf", kind, others=others)
    run = opened(path)
    assert nats(run, held_out()) <= most * float_nats()
    assert answer(path, run) == "Test whether a path exists.  Returns False for broken symbolic links"


def answer(path: Path, run: PagedRun) -> str:
    """To the README's question, by text and weights of the file alone."""
    files = open_model(path)
    tokenizer = Tokenizer.load(files)
    template = ChatTemplate.load(files, tokenizer.named_tokens, tokenizer.added_tokens)
    assert template is not None
    question = [{"role": "user", "content": "What does `os.path.exists` do?"}]
    [ids] = tokenizer._encode([template.rendered(question, add_generation_prompt=True).text], False)
    said: list[int] = []
    ends = run.model.config.eos_token_ids
    [logits] = run.step([("answer", ids, len(ids))])
    while (token := int(logits[-1].argmax())) not in ends:
        said.append(token)
        [logits] = run.step([("answer", [token], len(ids))])
    return tokenizer.decode(said)
