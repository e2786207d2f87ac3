"""Writes the model as a Hugging Face folder, each file atomically."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from demo import held_out
from demo.held_out import HeldOut
from demo.measure import Loss
from demo.vocabulary import BOS, END, END_OF_TEXT, tokenizer_config

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [llama, python, demo]
---
# Baton's demo model

A small Llama-architecture decoder that ships with Baton so that a fresh clone answers with real text. It continues
Python source code and answers questions such as *What does `os.path.join` do?* with the docstring. It knows little
else, and it makes things up about names it has rarely or never seen: it is there to demonstrate and to measure Baton,
not to give advice.

| | |
|---|---|
| Parameters | {num_parameters:,}: {shape} |
| Vocabulary | {vocab:,} tokens, byte-level BPE |
| Context | {context:,} tokens |
| Weights | bfloat16, {weight_mb:.1f} MB |
| Steps | {steps:,} of about {tokens_per_step:,} tokens |
| Tokens seen | {tokens:,} |
| Training time | {seconds:,.0f} s, in which it got {cpu_seconds:,.0f} CPU seconds |
| Hardware | {hardware} |
| Command | `{command}` |
| Seed | {seed} |
| Versions | Python {python}, torch {torch} |

The learning rate follows the steps or the clock, whichever is further on, so a repeated run lands near these figures
and not on them.

## Measured on held-out text

Measured with the exported bfloat16 weights, computing in float32, on `held_out.json`, which lies beside them.

| held out | nats per token | bits per byte | tokens |
|---|---|---|---|
| source | {source.nats:.4f} | {source.bits_per_byte:.4f} | {source.num_tokens:,} |
| chat | {chat.nats:.4f} | {chat.bits_per_byte:.4f} | {chat.num_tokens:,} |

Recitation: asked for {asked} well-known functions of the *training* part, greedily, the answer opens with the first
line of the docstring for {recited} of them.

## Data

The standard library of the Python that ran the training, and nothing else: its sources without tests and tables
together with the language reference of `help()` ({num_documents:,} documents, {source_tokens:,} tokens), and the
docstrings of its public names as dialogues ({num_entries:,} names, of which {well_known:,} well-known ones are asked
for more often). Whole files and names are held out by a hash of their name. A held-out name is never asked for in
training, but its docstring may occur in a source file of the training part. Python's own sources are under the PSF
License.

## Form

`<|bos|><|user|>question<|end|><|assistant|>answer<|end|>`, with an optional `<|system|>prompt<|end|>` first; the chat
template in `tokenizer_config.json` writes it. Texts that are not dialogues are `<|bos|>text<|endoftext|>`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The facts of the training run that the model card states."""

    steps: int
    tokens_per_step: int
    tokens: int
    seconds: float
    cpu_seconds: float
    hardware: str
    command: str
    seed: int
    python: str
    torch: str
    num_documents: int
    source_tokens: int
    num_entries: int
    well_known: int
    source: Loss
    chat: Loss
    asked: int
    recited: int


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically: who opens it gets the old content or the new one, whole."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


def replace_json(path: Path, content: object) -> None:
    """`replace` with the JSON form of `content`."""
    replace(path, (json.dumps(content, indent=2) + "\n").encode())


def write_folder(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, sample: HeldOut) -> None:
    """Write everything but the card: weights in bfloat16, configuration, tokenizer, held-out sample."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    stops = [tokenizer.token_to_id(token) for token in (END_OF_TEXT, END)]
    special = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": stops, "pad_token_id": stops[0]}
    replace_json(folder / "tokenizer_config.json", tokenizer_config(config.max_position_embeddings))
    replace(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    replace_json(folder / held_out.FILE_NAME, held_out.to_json(sample))
    replace_json(
        folder / "generation_config.json",
        {**special, "do_sample": True, "temperature": 0.3, "top_p": 0.95},
    )
    replace_json(folder / "config.json", {**config_of(model), **special})
    replace(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))


def config_of(model: LlamaForCausalLM) -> dict[str, object]:
    """The `config.json` of the model, in the spelling that every version of transformers reads."""
    config = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": 10000.0,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def write_card(folder: Path, model: LlamaForCausalLM, run: TrainingRun) -> None:
    """Write the model card of the weights that lie in `folder`."""
    config = model.config
    facts = {name: getattr(run, name) for name in TrainingRun.__dataclass_fields__}
    card = CARD.format(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        shape=(
            f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} query heads "
            f"and {config.num_key_value_heads} KV heads of {config.head_dim}, tied embeddings"
        ),
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        weight_mb=(folder / "model.safetensors").stat().st_size / 1e6,
        **facts,
    )
    replace(folder / "README.md", card.encode())
