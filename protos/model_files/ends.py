"""The tokens that end an answer, alike in gateways and workers."""

from __future__ import annotations

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from protos.model_files.files_seam import ModelFiles
from protos.model_files.tokenizers.special_tokens import named_tokens


def end_ids(files: ModelFiles, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids of end tokens: those of generation_config.json, of `config`, and the tokenizer's `eos_token`, because
    fine-tuning often changes only one of the three. Raises BadCheckpoint if none of them is in the vocabulary."""
    generation = Fields(files.json("generation_config.json") or {}, files.where("generation_config.json"))
    named = (*generation.ids("eos_token_id"), *config.ids("eos_token_id"))
    text = named_tokens(files.json).get("eos_token")
    of_tokenizer = None if text is None else files.token_id(text)
    ids = dict.fromkeys(named if of_tokenizer is None else (*named, of_tokenizer))
    usable = tuple(token_id for token_id in ids if token_id < vocab_size)
    if ids and not usable:
        raise BadCheckpoint(f"{config.where}: eos_token_id {named} is outside the vocabulary of {vocab_size}")
    return usable
