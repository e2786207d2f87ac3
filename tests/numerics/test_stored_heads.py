"""Checkpoints whose head is stored otherwise than config.json says, or not at all: transformers' logits and vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model
from workers.models.transformers.transformers_loader import load_transformers
from workers.worker_config import WorkerConfig

EMBEDDINGS = {"qwen2": "model.embed_tokens.weight", "gpt_neox": "gpt_neox.embed_in.weight"}
HEADS = {"qwen2": "lm_head.weight", "gpt_neox": "embed_out.weight"}
TOKENS = random_tokens(37)


def stored(folder: Path, source: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The checkpoint with these tensors and changes of its config.json."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("case", ["differs", "equal", "only the head"])
@torch.no_grad()
def test_a_tied_model_has_the_head_that_is_stored(
    checkpoint: Checkpoint, family: str, case: str, tmp_path: Path
) -> None:
    source, _ = checkpoint(family, tie_word_embeddings=False)
    tensors = load_file(source / "model.safetensors")
    if case == "equal":
        tensors[HEADS[family]] = tensors[EMBEDDINGS[family]].clone()
    if case == "only the head":
        del tensors[EMBEDDINGS[family]]
    folder = stored(tmp_path, source, tensors, tie_word_embeddings=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = load_transformers(folder) if family == "gpt_neox" else load_model(folder)
    assert_close(PagedRun(model).step([("a", TOKENS, len(TOKENS))])[0], oracle(torch.tensor([TOKENS])).logits[0])
    if family == "qwen2":
        assert model.config.tied_embeddings == (case != "differs")


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen3", "Qwen3Model"), ("mistral", "MistralModel"), ("qwen3", "Qwen3ForCausalLM"), ("gpt_neox", "GPTNeoXModel")],
)
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_decoder_without_a_head_has_transformers_vectors(
    checkpoint: Checkpoint, family: str, architecture: str, tied: bool, tmp_path: Path
) -> None:
    source, _ = checkpoint(family)
    whole = load_file(source / "model.safetensors")
    prefix = EMBEDDINGS.get(family, "model.").partition(".")[0] + "."
    tensors = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    folder = stored(tmp_path, source, tensors, architectures=[architecture], tie_word_embeddings=tied)
    oracle = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=64)
    with colocated(config) as engine:
        [vector] = answer(engine, [TOKENS], [SamplingParams(max_tokens=1, pooling="last")])
    vector_E = torch.from_numpy(np.frombuffer(vector.updates[-1].embedding, dtype=np.float32).copy())
    assert_close(vector_E, oracle(torch.tensor([TOKENS])).last_hidden_state[0, -1])
