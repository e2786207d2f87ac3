"""Text parts of models that read images too: the logits of the whole model, from the files that it is saved in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from protos.errors import UnsupportedModel
from protos.model_files.opening import open_model
from router.text.model_card import ModelCard
from tests.numerics.checkpoints import FAMILIES, SHAPE
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model
from workers.models.model_config import read_config, weight_bytes

VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def gemma3() -> Any:
    text = SHAPE | FAMILIES["gemma3"][2]
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    )


def mistral3() -> Any:
    text = SHAPE | {"model_type": "mistral", "head_dim": 24, "sliding_window": None}
    vision = VISION | {"model_type": "pixtral"}
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


def ministral3() -> Any:
    text = SHAPE | {"model_type": "ministral3"} | FAMILIES["ministral3"][2]
    vision = VISION | {"model_type": "pixtral"}
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


@pytest.mark.parametrize("make", [gemma3, mistral3, ministral3])
@pytest.mark.parametrize("saved_as", ["published", "in memory"])
@torch.no_grad()
def test_the_text_part_has_the_models_logits(make: Any, saved_as: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    if saved_as == "in memory":
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file({name: value for name, value in state.items() if name != "lm_head.weight" or make is not gemma3},
                  tmp_path / "model.safetensors")  # fmt: skip
    tokens = random_tokens(37)
    ours = PagedRun(load_model(tmp_path)).step([("only", tokens, len(tokens))])[0]
    assert_close(ours, model(torch.tensor([tokens])).logits[0])
    stored = load_file(tmp_path / "model.safetensors")
    text = [value.nbytes for name, value in stored.items() if "language_model" in name or "lm_head" in name]
    assert weight_bytes(tmp_path, "float32") == sum(text)


def test_a_gateway_reads_the_text_parts_limits(tmp_path: Path) -> None:
    """Gemma 3 4B's config.json leaves them to the class."""
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {
        "hidden_size": 64, "intermediate_size": 96, "model_type": "gemma3_text", "num_hidden_layers": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = ModelCard.load(open_model(tmp_path), "gemma")
    assert (card.max_model_len, card.vocab_size, card.eos_token_ids) == (131_072, 262_208, frozenset({1, 106}))
    read = read_config(tmp_path)
    assert (read.num_heads, read.head_dim, read.tied_embeddings, read.eos_token_ids) == (8, 256, True, (1, 106))


def test_a_text_part_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="model_type 'mistral4' is not supported"):
        read_config(tmp_path)
