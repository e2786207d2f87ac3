"""The held-out sample: texts that no batch contained, stored beside the weights so that the figures can be repeated."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.corpus import Corpus
from demo.rows import ask
from demo.vocabulary import BOS, render_dialogue

FILE_NAME = "held_out.json"
NUM_PASSAGES = 32
PASSAGE_CHARS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Texts, special tokens included, to be encoded without adding any."""

    source: Sequence[str]
    chat: Sequence[str]


def choose(corpus: Corpus, *, seed: int) -> HeldOut:
    """Passages of the held-out files, each from the start of a line, and one dialogue for each held-out name."""
    rng = random.Random(seed)
    passages = [
        BOS + document.text[start : start + PASSAGE_CHARS].split("\n", 1)[-1]
        for document in corpus.held_out_documents
        for start in range(0, len(document.text) - PASSAGE_CHARS, PASSAGE_CHARS)
    ]
    dialogues = [
        render_dialogue([("user", ask(entry, rng)), ("assistant", entry.answer)]) for entry in corpus.held_out_entries
    ]
    return HeldOut(source=rng.sample(passages, min(NUM_PASSAGES, len(passages))), chat=dialogues)


def to_json(held_out: HeldOut) -> dict[str, list[str]]:
    """The contents of `held_out.json`."""
    return {"source": list(held_out.source), "chat": list(held_out.chat)}


def load(folder: Path) -> HeldOut:
    """Read the sample that lies beside the weights in `folder`."""
    texts = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    return HeldOut(source=texts["source"], chat=texts["chat"])
