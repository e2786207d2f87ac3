"""`worker.quantize`: float checkpoints that are rounded as they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint, Misconfigured
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.paged import PagedRun
from tests.numerics.test_tensor_parallel import on_ranks
from workers.models.loader import load_model
from workers.models.model_config import read_config, weight_bytes
from workers.parallel.group import TensorParallel
from workers.quantise.quantise import quantise
from workers.quantise.recipe import QuantiseRecipe
from workers.weights.group_rounding import GroupRounding
from workers.weights.weight_formats import Quantize

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320}  # a group of down_proj is on both of two ranks


def by_the_rule(name: str, weight: torch.Tensor, levels: Quantize) -> torch.Tensor:
    if not name.endswith(("_proj.weight", "lm_head.weight")):
        return weight
    if levels == "fp8":
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-20)
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    bits = 8 if levels == "int8" or name == "lm_head.weight" else 4
    return GroupRounding(bits=bits, group_size=128).rounded(weight)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("family", "levels", "tied"),
    [("llama", "int4", True), ("qwen2", "int8", False), ("mistral", "fp8", True), ("qwen3", "int4", False)],
)
@torch.no_grad()
def test_logits_equal_those_of_rounded_weights(
    family: str, levels: Quantize, tied: bool, tp: int, tmp_path: Path
) -> None:
    oracle: Any = make_checkpoint(family, tmp_path, tie_word_embeddings=tied, **SHAPE)
    hidden: list[torch.Tensor] = []
    head = by_the_rule("lm_head.weight", oracle.lm_head.weight.clone(), levels)
    for name, weight in oracle.named_parameters():
        if not name.startswith("lm_head"):
            weight.copy_(by_the_rule(name, weight, levels))
    tokens = random_tokens(33, seed=1)
    hidden.append(oracle.model(torch.tensor([tokens])).last_hidden_state[0])

    def program(group: TensorParallel) -> torch.Tensor:
        model = load_model(tmp_path, quantize=levels, parallel=group)
        model.pack()
        return PagedRun(model).step([("only", tokens, 33)])[0]

    for logits in on_ranks(tp, program):
        assert_close(logits, hidden[0] @ head.T)


@torch.no_grad()
def test_the_layers_equal_those_of_baton_quantize(tmp_path: Path) -> None:
    """Where the groups divide the inputs; the head apart, which `baton quantize` leaves in floating point."""
    overrides: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    make_checkpoint("llama", tmp_path / "float", **overrides)
    recipe = QuantiseRecipe(method="rtn", bits=8, group_size=128)
    quantise(tmp_path / "float", tmp_path / "out", recipe, [], lambda *_: None)
    tokens = random_tokens(20)
    logits = PagedRun(load_model(tmp_path / "float", quantize="int8")).step([("a", tokens, 20)])[0]
    other = PagedRun(load_model(tmp_path / "out")).step([("a", tokens, 20)])[0]
    assert float((logits - other).abs().max()) < 0.02 * float(other.abs().max())


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "float", **SHAPE)
    recipe = QuantiseRecipe(method="rtn", bits=4, group_size=64)
    quantise(tmp_path / "float", tmp_path / "out", recipe, [], lambda *_: None)
    with pytest.raises(Misconfigured, match="quantize is int8"):
        read_config(tmp_path / "out", "int8")


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(damage: float, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "float", **SHAPE)
    file = tmp_path / "float" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = damage
    save_file(tensors, file)
    levels: Quantize
    for levels in ("int4", "int8", "fp8"):
        with pytest.raises(BadCheckpoint, match=f"{name} has weights that are NaN or infinite"):
            load_model(tmp_path / "float", quantize=levels)
    recipe = QuantiseRecipe(method="rtn", bits=8, group_size=64)
    with pytest.raises(BadCheckpoint, match=name):
        quantise(tmp_path / "float", tmp_path / "out", recipe, [], lambda *_: None)


def test_bytes_are_counted_as_they_will_be(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, tie_word_embeddings=True, **SHAPE)
    config = json.loads((tmp_path / "config.json").read_text())
    floats = (config["vocab_size"] + 5) * 128 * 2
    linear = read_config(tmp_path).num_linear_weights
    head = config["vocab_size"] * (128 + 2)
    four, eight = (weight_bytes(tmp_path, "bfloat16", levels) for levels in ("int4", "int8"))
    assert four - floats - head == pytest.approx(linear * (4 + 16 / 128) / 8, rel=0.02)
    assert eight - floats - head == pytest.approx(linear * (8 + 16 / 128) / 8, rel=0.02)
    assert "rounded-int4-g128, " in load_model(tmp_path, quantize="int4").stored_as


def test_no_float_weight_stays(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, **SHAPE)
    model = load_model(tmp_path, quantize="int4")
    linear = [slot for slot in model.slots() if slot.name.endswith("_proj.weight")]
    assert len(linear) == 14
    assert all(slot.target.device.type == "meta" for slot in linear)


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8 + 16 / 64), ("fp8", 8 + 16 / 64)])
def test_a_tied_head_counts_among_the_bits_of_a_weight(quantize: Quantize, bits: float, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, tie_word_embeddings=True, hidden_size=64, intermediate_size=64)
    told = load_model(tmp_path, quantize=quantize).stored_as
    assert told.endswith(f", {bits:.4g} bits a weight"), told
