"""Turns the corpus into training batches: windows of source code, and rows packed full of dialogues."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from demo.corpus import QUESTIONS, SMALL_TALK, SYSTEM_PROMPTS, Corpus, DocstringEntry
from demo.vocabulary import BOS, END_OF_TEXT, render_dialogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Shares, each between 0 and 1, of what a training batch is made of, and how long its rows are."""

    chat: float = 0.6
    well_known: float = 0.55
    small_talk: float = 0.02
    system_prompt: float = 0.15
    next_turn: float = 0.25
    # (tokens a row, share of the steps): mostly short rows, which are cheap, and the whole context often enough.
    lengths: tuple[tuple[int, float], ...] = ((256, 0.80), (512, 0.12), (2048, 0.08))


def ask(entry: DocstringEntry, rng: random.Random) -> str:
    """One of the question templates about an entry."""
    return rng.choice(QUESTIONS[entry.kind]).format(name=entry.name)


class TrainingRows:
    """An endless supply of training batches; two with the same seed and corpus yield the same ones."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, mixture: Mixture, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._mixture = mixture
        self._well_known = [entry for entry in corpus.entries if entry.well_known]
        self._others = [entry for entry in corpus.entries if not entry.well_known]
        texts = [f"{BOS}{document.text}{END_OF_TEXT}" for document in corpus.documents]
        self._source = [token for text in texts for token in self._encode(text)]

    @property
    def num_source_tokens(self) -> int:
        """Tokens in the training half of the source documents."""
        return len(self._source)

    def batch(self, tokens: int) -> torch.Tensor:
        """A batch [B, T + 1] int64 of about `tokens` tokens; T is drawn from the mixture, B follows from it."""
        lengths, shares = zip(*self._mixture.lengths, strict=True)
        length: int = self._rng.choices(lengths, shares)[0]
        rows = [self._row(length + 1) for _ in range(max(1, tokens // length))]
        return torch.tensor(rows, dtype=torch.int64)

    def _row(self, length: int) -> list[int]:
        if self._rng.random() < self._mixture.chat:
            return self._chat_row(length)
        start = self._rng.randrange(len(self._source) - length)
        return self._source[start : start + length]

    def _chat_row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            row += self._encode(render_dialogue(list(self._dialogue())))
        return row[:length]

    def _dialogue(self) -> Iterator[tuple[str, str]]:
        rng = self._rng
        if rng.random() < self._mixture.system_prompt:
            yield "system", rng.choice(SYSTEM_PROMPTS)
        while True:
            question, answer = self._exchange()
            yield "user", question
            yield "assistant", answer
            if rng.random() >= self._mixture.next_turn:
                return

    def _exchange(self) -> tuple[str, str]:
        rng = self._rng
        if rng.random() < self._mixture.small_talk:
            return rng.choice(SMALL_TALK)
        entries: Sequence[DocstringEntry] = (
            self._well_known if rng.random() < self._mixture.well_known else self._others
        )
        entry = rng.choice(entries)
        return ask(entry, rng), entry.answer

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
