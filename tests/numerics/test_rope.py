"""Every rope scaling against transformers, below and beyond the length it was trained with, in both config forms."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from workers.models.loader import load_model
from workers.models.model_config import read_config

NUM_PAIRS = 8
MAX_POSITION = 32
FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(NUM_PAIRS)],
    "long_factor": [1.5 + i for i in range(NUM_PAIRS)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 16, **FACTORS},
    "longrope-factor": {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 16, **FACTORS},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}
LENGTH_DEPENDENT = ("dynamic", "longrope", "longrope-factor")


@pytest.fixture(params=SCALINGS)
def scaled(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> tuple[Path, Any]:
    return checkpoint_of(request.param, checkpoint)


def checkpoint_of(name: str, checkpoint: Checkpoint) -> tuple[Path, Any]:
    """The oracle is a fresh copy: transformers' dynamic ropes remember the longest sequence they have seen."""
    parameters = {"rope_theta": 500.0, **SCALINGS[name]}
    folder, oracle = checkpoint("llama", max_position_embeddings=MAX_POSITION, rope_parameters=parameters)
    return folder, copy.deepcopy(oracle)


@torch.no_grad()
def incremental(oracle: Any, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """The logits of transformers' `generate`: the prompt in one piece, then token by token over its cache."""
    out = oracle(torch.tensor([tokens[:prompt_len]]), use_cache=True)
    logits = [out.logits[0]]
    for token in tokens[prompt_len:]:
        out = oracle(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("prompt_len", [12, 60], ids=["short-prompt", "prompt-beyond-training"])
@pytest.mark.parametrize("sizes", [(60,), (16, 16, 9, 3)], ids=["whole", "chunks"])
def test_a_sequence_that_outgrows_training(scaled: tuple[Path, Any], prompt_len: int, sizes: tuple[int, ...]) -> None:
    """The same tokens whether the prompt was computed whole or in chunks, and whether or not decoding went on."""
    folder, oracle = scaled
    tokens = random_tokens(66, seed=prompt_len)
    ours = in_chunks(PagedRun(load_model(folder)), tokens, sizes, prompt_len=prompt_len)
    assert_close(ours, incremental(oracle, tokens, prompt_len))


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_a_long_sequence_does_not_change_the_short_one_beside_it(name: str, checkpoint: Checkpoint) -> None:
    folder, oracle = checkpoint_of(name, checkpoint)
    short, long = random_tokens(10, seed=1), random_tokens(60, seed=2)
    ours = PagedRun(load_model(folder)).step([("long", long, 60), ("short", short, 10)])
    assert_close(ours[1], incremental(oracle, short, 10))
    assert_close(ours[0], incremental(oracle, long, 60))


@pytest.mark.parametrize("name", SCALINGS)
def test_prompts_share_cached_blocks_only_where_their_keys_agree(name: str, checkpoint: Checkpoint) -> None:
    config = read_config(checkpoint_of(name, checkpoint)[0])
    assert config.prefix_key(MAX_POSITION // 2) == b""
    assert (config.prefix_key(60) != b"") == (name in LENGTH_DEPENDENT)
    assert (config.prefix_key(60) != config.prefix_key(61)) == (name == "dynamic")


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_the_old_form_of_the_config_means_the_same(
    name: str, type_key: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, _ = checkpoint_of(name, checkpoint)
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[type_key] = scaling.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else scaling
    shutil.copytree(folder, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "old") == read_config(folder)


@torch.no_grad()
def test_the_original_length_may_stand_beside_the_parameters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint_of("longrope", checkpoint)
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = 24
    shutil.copytree(folder, tmp_path / "beside")
    (tmp_path / "beside" / "config.json").write_text(json.dumps(config))
    oracle = checkpoint_of("longrope", checkpoint)[1].__class__.from_pretrained(tmp_path / "beside")
    tokens = random_tokens(20)
    ours = PagedRun(load_model(tmp_path / "beside")).step([("only", tokens, 20)])[0]
    assert_close(ours, oracle(torch.tensor([tokens])).logits[0])
