"""What a model is worth: its loss on texts, and how many docstrings it can recite. Needs only its logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tokenizers import Tokenizer

from demo.corpus import DocstringEntry
from demo.vocabulary import BOS, END, open_dialogue


class Logits(Protocol):
    """Maps token ids [1, T] int64 to logits [1, T, V]."""

    def __call__(self, ids_1T: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Mean cross entropy over `num_tokens` predicted tokens, in nats a token and in bits a byte of their text."""

    nats: float
    bits_per_byte: float
    num_tokens: int


@torch.no_grad()
def loss_of(logits: Logits, tokenizer: Tokenizer, texts: Sequence[str], device: torch.device) -> Loss:
    """The loss of a model on `texts`, which hold their own special tokens, each read from its first token."""
    nats = 0.0
    num_tokens = 0
    num_bytes = 0
    for text in texts:
        ids_1T = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids], device=device)
        logits_TV = logits(ids_1T[:, :-1])[0].float()
        nats += torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, 1:], reduction="sum").item()
        num_tokens += ids_1T.shape[1] - 1
        num_bytes += len(text.removeprefix(BOS).encode())
    return Loss(nats=nats / num_tokens, bits_per_byte=nats / math.log(2) / num_bytes, num_tokens=num_tokens)


@torch.no_grad()
def answer(logits: Logits, tokenizer: Tokenizer, question: str, device: torch.device, *, max_tokens: int) -> str:
    """The greedy answer to a question, without a KV cache: slow, and right by construction."""
    ids = tokenizer.encode(open_dialogue(question), add_special_tokens=False).ids
    num_prompt = len(ids)
    stop = tokenizer.token_to_id(END)
    while len(ids) < num_prompt + max_tokens:
        best = int(logits(torch.tensor([ids], device=device))[0, -1].argmax())
        if best == stop:
            break
        ids.append(best)
    text: str = tokenizer.decode(ids[num_prompt:])
    return text


def num_recited(logits: Logits, tokenizer: Tokenizer, entries: Sequence[DocstringEntry], device: torch.device) -> int:
    """Of how many `entries` the greedy answer opens with the docstring's first line."""
    recited = 0
    for entry in entries:
        line = entry.answer.splitlines()[0]
        # One more than the line needs: a text need not be cut into the same tokens when it continues.
        budget = len(tokenizer.encode(line, add_special_tokens=False).ids) + 1
        said = answer(logits, tokenizer, f"What does `{entry.name}` do?", device, max_tokens=budget)
        recited += said.startswith(line)
    return recited
