"""A random model that can spell, and the oracle of its answers under a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLTokenizer

from protos.values import SamplingParams

EOS, VOCAB_SIZE = 2, 320
PIECES = ['{"', '":', '",', ": ", ', "', "true", "false", "null", '"}', '{"name', "12", "0.5", "  ", '"}</s>']
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = [[5, 9, 200], list(range(3, 40)), [77] * 20]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and some longer pieces; a model of VOCAB_SIZE has further ids."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    mapped = [piece.replace(" ", "Ġ") for piece in PIECES]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, *mapped])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))


def under(grammar: str, max_tokens: int = 80, **changes: Any) -> SamplingParams:
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "grammar": grammar}
    return SamplingParams(**(asked | changes))


@torch.no_grad()
def masked_oracle(folder: Path, oracle: Any, prompt: Sequence[int], grammar: str, max_tokens: int) -> list[int]:
    """Token by token: transformers' logits, less what the library refuses."""
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    matcher, output = LLMatcher(tokenizer, grammar), list[int]()
    while len(output) < max_tokens and output[-1:] != [EOS]:
        logits = oracle(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB_SIZE]
        logits[torch.from_numpy(bits) == 0] = -torch.inf
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > 2e-5, "the oracle chose by too little: take another prompt"
        output.append(int(best.indices[0]))
        matcher.consume_token(output[-1])
    return output
