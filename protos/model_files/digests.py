"""Digests of a model's files, by which processes on several hosts know that they read the same model.

weights      config.json, and of each file with weights its name, its size and SAMPLES pieces: a whole checkpoint
             takes minutes to read, and another training changes all of it
tokenizer    the files that turn text into tokens
template     the chat templates
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from protos.model_files.files_seam import ModelFiles
from protos.model_files.plain_files import open_plain, read_plain
from protos.model_files.templates import chat_templates
from protos.values import ModelDigests

SAMPLES, SAMPLE_BYTES = 16, 4096
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "merges.txt", "vocab.json", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip


def read_digests(files: ModelFiles) -> ModelDigests:
    """ "" for a part that is not there. Raises BadCheckpoint."""
    templates = [text.encode() for pair in sorted(chat_templates(files).items()) for text in pair]
    return ModelDigests(weights=_weights(files), tokenizer=_tokenizer(files), template=_digest(templates))


def _weights(files: ModelFiles) -> str:
    if not (paths := files.weight_files()):
        return ""
    config = json.dumps(dict(files.json("config.json") or {}), sort_keys=True, default=str)
    return _digest([config.encode(), *(piece for path in paths for piece in _sampled(path))])


def _sampled(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    yield f"{path.name} {size}".encode()
    with open_plain(path) as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _tokenizer(files: ModelFiles) -> str:
    """The digest of the tokenizer; of a GGUF file that of its header, which has the vocabulary."""
    if files.path.is_file():
        return files.fingerprint()
    config = dict(files.json("tokenizer_config.json") or {})
    config.pop("chat_template", None)
    paths = [path for name in TOKENIZERS if (path := files.path / name).is_file()]
    return _digest([json.dumps(config, sort_keys=True).encode(), *(read_plain(path) for path in paths)])


def _digest(parts: Iterable[bytes]) -> str:
    digest, is_empty = hashlib.blake2b(digest_size=8), True
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
        is_empty = False
    return "" if is_empty else digest.hexdigest()
