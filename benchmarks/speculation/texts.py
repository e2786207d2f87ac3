"""Prompts with answers of a known overlap, from the demo model's held-out source code. Pure.

edit         the prompt's code with one name replaced by a new one
summarise    one in three of the prompt's lines, in their order, some followed by a line of another file
retrieve     60 % of the tokens are lines of the prompt, 40 % lines of another file
random       tokens at random: nothing to copy
mixed        edit, summarise and retrieve in turn
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from tokenizers import Tokenizer

from benchmarks.engine.cpu_engine import DEMO
from demo.held_out import load

COPYING = ("edit", "summarise", "retrieve")
_NAME = re.compile(r"\b[a-z_]{4,}\b")
_NEW_NAMES = ("renamed_value", "other_thing", "my_replacement", "fresh_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """`answer_ids` are what the model is made to answer."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def given_answers(
    workload: str, count: int, *, prompt_len: int, answer_len: int, seed: int, vocab_size: int
) -> list[GivenAnswer]:
    """Lengths in tokens; a prompt of code is at most `prompt_len` long. The same seed gives the same texts."""
    made = []
    for number in range(count):
        chance = Random(f"{workload}.{seed}.{number}")
        kind = COPYING[number % len(COPYING)] if workload == "mixed" else workload
        if kind == "random":
            tokens = [chance.randrange(3, vocab_size) for _ in range(prompt_len + answer_len)]
            prompt_ids, answer_ids = tokens[:prompt_len], tokens[prompt_len:]
        else:
            prompt, answer = _code(kind, chance, answer_len)
            prompt_ids, answer_ids = encoded(prompt)[-prompt_len:], encoded(answer)[:answer_len]
        made.append(GivenAnswer(prompt_ids=tuple(prompt_ids), answer_ids=tuple(answer_ids)))
    return made


def _code(kind: str, chance: Random, answer_len: int) -> tuple[str, str]:
    """Prompt and answer, which has at least `answer_len` tokens."""
    passages = source_passages()
    prompt, *others = chance.sample(passages, len(passages))
    further = iter([line for passage in others for line in passage.splitlines() if line.strip()])
    if kind == "edit":
        return _renamed(prompt, chance, others, answer_len)
    lines = [line for line in prompt.splitlines() if line.strip()]
    copied, total, answer = 0, 0, list[str]()
    while total < answer_len:
        if kind == "summarise":
            for line in [line for line in lines if chance.random() < 1 / 3]:
                answer += [line, next(further)] if chance.random() < 1 / 4 else [line]
        elif copied <= 0.6 * total:
            first = chance.randrange(max(1, len(lines) - 3))
            piece = lines[first : first + chance.randrange(1, 4)]
            answer += piece
            copied += len(encoded("\n".join(piece)))
        else:
            answer.append(next(further))
        total = len(encoded("\n".join(answer)))
    return prompt, "\n".join(answer)


def _renamed(prompt: str, chance: Random, others: Sequence[str], answer_len: int) -> tuple[str, str]:
    """The prompt is the passage, and as much of another one as the answer needs."""
    further = list(others)
    while len(encoded(prompt)) < answer_len:
        prompt += "\n" + further.pop()
    name, _ = Counter(_NAME.findall(prompt)).most_common(1)[0]
    return prompt, re.sub(rf"\b{name}\b", chance.choice(_NEW_NAMES), prompt)


@cache
def source_passages() -> tuple[str, ...]:
    """Held-out source code, about 450 tokens each."""
    return tuple([passage.removeprefix("<|bos|>") for passage in load(DEMO).source])


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def encoded(text: str) -> list[int]:
    token_ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return token_ids
