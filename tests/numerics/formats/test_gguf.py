"""GGUF files served in float32: the oracle is a transformers model with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import BadCheckpoint
from tests.gguf_blocks import SIZES, random_blocks
from tests.gguf_models import convert
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.formats.served import assert_served
from workers.models.loader import load_model
from workers.models.model_config import read_config
from workers.weights.formats.gguf_blocks import QUANTISED, weight_of_blocks
from workers.weights.registry import open_source

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.05,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_every_bit_of_random_blocks_is_read_as_the_layout_says(kind: str) -> None:
    stored = random_blocks(kind, 3, 512, seed=len(kind))
    ours = weight_of_blocks(kind, torch.from_numpy(stored)).dequantised().numpy()
    assert np.array_equal(ours, gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    assert set(SIZES) == QUANTISED


class _NothingFromTheHost(TorchDispatchMode):
    """Raises where a tensor is copied from the host, which the CUDA graph of a decode step forbids."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor is made of numbers of the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_rows_are_looked_up_without_a_copy_from_the_host(kind: str) -> None:
    stored = torch.from_numpy(random_blocks(kind, 3, 512, seed=1))
    expected = weight_of_blocks(kind, stored).dequantised()
    with _NothingFromTheHost():
        assert torch.equal(weight_of_blocks(kind, stored).dequantised(), expected)


def convert_with_oracle(family: str, folder: Path, kind: str, *, others: dict[str, str], **overrides: Any) -> Any:
    """folder/model.gguf, and the transformers model with its weights."""
    oracle: Any = make_checkpoint(family, folder / "hf", **overrides)
    convert(folder / "hf", folder / "model.gguf", kind, others=others)
    with open_source(folder / "model.gguf") as source:
        for name, weight in oracle.state_dict().items():
            if name not in source.names():
                continue
            stored = source.describe(name)
            read = source.read(name, 0, slice(0, stored.shape[0]))
            weight.copy_(weight_of_blocks(stored.dtype, read).dequantised() if stored.dtype in QUANTISED else read)
    if oracle.config.tie_word_embeddings:
        oracle.tie_weights()
    return oracle


MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}  # as Q4_K_M
FLOAT_EMBEDDING = {"token_embd": "F32", "output": "F16"}


@pytest.mark.parametrize(
    ("family", "kind", "others", "overrides", "tp"),
    [
        ("llama", "Q8_0", {}, {}, 1),
        ("llama", "Q4_K", MIXED, WIDE | {"tie_word_embeddings": True}, 2),
        ("llama", "Q4_0", FLOAT_EMBEDDING, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}, 2),
        ("mistral", "Q4_0", {}, {}, 1),
        ("granite", "Q8_0", {}, {"attention_bias": True}, 2),
        ("olmo2", "Q4_0", {}, {}, 2),
        ("smollm3", "F16", {}, {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, 1),
        ("qwen2", "Q4_K", MIXED, WIDE | {"vocab_size": 161}, 2),
        ("qwen2", "BF16", {}, {"tie_word_embeddings": False}, 1),
        ("qwen3", "F16", {}, {}, 2),
        ("qwen3", "Q6_K", {"ffn": "Q4_K", "attn_k": "Q8_0"}, WIDE | {"head_dim": 32}, 1),
    ],
)
def test_logits_equal_those_of_dequantised_weights(
    family: str, kind: str, others: dict[str, str], overrides: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    oracle = convert_with_oracle(family, tmp_path, kind, others=others, **overrides)
    assert_served(tmp_path / "model.gguf", oracle, tp=tp)


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
], ids=lambda rope: str(rope["rope_type"]))  # fmt: skip
def test_rope_scaling_is_in_the_metadata(rope: dict[str, Any], tmp_path: Path) -> None:
    oracle = convert_with_oracle("qwen2", tmp_path, "F32", others={}, rope_parameters=rope)
    assert_served(tmp_path / "model.gguf", oracle)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "Q5_1", "IQ4_NL"])
def test_a_cut_inside_a_block_keeps_its_values(kind: str, tmp_path: Path) -> None:
    """Two ranks share inputs of blocks of 32 or 256, with a cut inside a block."""
    stored = random_blocks(kind, 4, 512, seed=3)
    whole = weight_of_blocks(kind, torch.from_numpy(stored))
    for start, size in ((0, 144), (144, 144), (288, 224)):
        cut = whole.cut_inputs(start, size)
        assert torch.equal(cut.dequantised(), whole.dequantised()[:, start : start + size])


def test_shards_are_served_as_one_model(tmp_path: Path) -> None:
    oracle = make_checkpoint("llama", tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "model.gguf", "F32", shards=3)
    assert path.name == "model-00001-of-00003.gguf"
    for location in (path, tmp_path):
        assert_served(location, oracle)


def test_the_config_equals_the_folders(tmp_path: Path) -> None:
    """But for how weights are stored."""
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        make_checkpoint(family, tmp_path / family, bos_token_id=None)
        path = convert(tmp_path / family, tmp_path / f"{family}.gguf", "Q8_0")
        ours, theirs = read_config(path), read_config(tmp_path / family)
        for field in (
            "family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "rope", "windows", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied_embeddings",
            "max_position", "max_model_len",
        ):  # fmt: skip
            assert getattr(ours, field) == getattr(theirs, field), (family, field)
        assert ours.norm_eps == pytest.approx(theirs.norm_eps)
        assert ours.weight_format is not None
        assert ours.weight_format.label == "gguf-Q8_0"


def test_a_tensor_that_does_not_fit_the_metadata_is_named(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 32)
    save_file(tensors, tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(
        BadCheckpoint, match=r"model\.gguf: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is \(96, 34\)"
    ):
        load_model(tmp_path / "model.gguf")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(BadCheckpoint, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(tmp_path / "model.gguf")
