"""Checkpoints that `baton quantize` writes, against transformers models with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from protos.errors import Misconfigured, UnsupportedModel
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import random_tokens
from tests.numerics.formats.served import assert_served
from workers.quantise.quantise import held_out_nats, quantise
from workers.quantise.recipe import QuantiseRecipe
from workers.quantization.bit_stream import unpack_bits

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 176,
}  # no group of 32 divides the latter: one scale a row
TEXT = [random_tokens(40, seed=seed) for seed in range(24)]


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a written folder in float32, unpacked by the format's rules."""
    weights = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            num_outputs, num_inputs = tensors[f"{layer}.weight_shape"].tolist()
            bits = tensor.shape[1] * 32 // num_inputs
            codes = unpack_bits(tensor.view(torch.uint8), bits, num_inputs).float()
            scale = tensors[f"{layer}.weight_scale"].float()
            scale = scale.repeat_interleave(num_inputs // scale.shape[1], dim=1)
            assert scale.shape == (num_outputs, num_inputs)
            weights[f"{layer}.weight"] = (codes - 2 ** (bits - 1)) * scale
        elif suffix not in ("weight_scale", "weight_shape"):
            weights[name] = tensor.float()
    return weights


def write(folder: Path, method: Any, bits: Any, **overrides: Any) -> tuple[Any, Path]:
    oracle: Any = make_checkpoint(overrides.pop("family", "llama"), folder / "float", **(SHAPE | overrides))
    recipe = QuantiseRecipe(method=method, bits=bits, group_size=64)
    quantise(folder / "float", folder / "out", recipe, TEXT if method != "rtn" else [], lambda done, total: None)
    return oracle, folder / "out"


@pytest.mark.parametrize(
    ("family", "method", "bits", "overrides"),
    [
        ("llama", "rtn", 4, {"num_key_value_heads": 4}),
        ("qwen3", "rtn", 8, {"tie_word_embeddings": True}),
        ("qwen2", "gptq", 4, {}),
        ("mistral", "awq", 4, {}),
        ("llama", "awq", 8, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_served_as_the_dequantised_weights(
    family: str, method: str, bits: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    oracle, out = write(tmp_path, method, bits, family=family, **overrides)
    missing = oracle.load_state_dict(dequantised(out), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    assert_served(out, oracle, tp=2 if method == "rtn" else 1)


@torch.no_grad()
def test_the_held_out_loss_equals_that_of_transformers(tmp_path: Path) -> None:
    oracle, out = write(tmp_path, "gptq", 4, family="mistral", sliding_window=24)
    for folder in (tmp_path / "float", out):
        if folder == out:
            oracle.load_state_dict(dequantised(out), strict=False)
        total = sum(
            float(F.cross_entropy(oracle(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="sum"))
            for ids in TEXT
        )
        assert held_out_nats(folder, TEXT) == pytest.approx(total / sum(len(ids) - 1 for ids in TEXT), rel=1e-5)


def test_awq_scaling_alone_changes_no_result(tmp_path: Path) -> None:
    """Eight bits lose next to nothing, so a scale that is folded wrongly shows."""
    for method in ("rtn", "awq", "gptq"):
        _, out = write(tmp_path / method, method, 8, num_key_value_heads=4, attention_bias=True)
        before, after = (held_out_nats(folder, TEXT) for folder in (tmp_path / method / "float", out))
        assert after == pytest.approx(before, rel=0.01)


def test_the_folder_equals_that_of_compressed_tensors(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "float", **SHAPE)
    (tmp_path / "float" / "tokenizer.json").write_text("{}")
    (tmp_path / "float" / "model.bin").write_text("other weights")
    quantise(
        tmp_path / "float", tmp_path / "out", QuantiseRecipe(method="rtn", bits=4, group_size=128), [], lambda *_: None
    )
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    of_group = {name: (group["targets"], group["weights"]) for name, group in config["config_groups"].items()}
    assert of_group["group_1"][0] == ["Linear"]
    assert (of_group["group_1"][1]["strategy"], of_group["group_1"][1]["group_size"]) == ("group", 128)
    assert of_group["group_0"][0] == ["re:.*mlp[.]down_proj$"]
    assert (of_group["group_0"][1]["strategy"], of_group["group_0"][1]["group_size"]) == ("channel", None)
    assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []


def test_a_large_checkpoint_becomes_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.quantise.quantised_folder._SHARD_BYTES", 1 << 16)
    make_checkpoint("llama", tmp_path / "float", **SHAPE)
    recipe = QuantiseRecipe(method="rtn", bits=8, group_size=64)
    quantise(tmp_path / "float", tmp_path / "out", recipe, [], lambda *_: None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert held_out_nats(tmp_path / "out", TEXT) == pytest.approx(held_out_nats(tmp_path / "float", TEXT), rel=0.01)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    _, out = write(tmp_path, "rtn", 4)
    recipe = QuantiseRecipe(method="rtn", bits=4, group_size=64)
    before = (out / "config.json").read_bytes()
    with pytest.raises(Misconfigured, match="is there already: give another OUT"):
        quantise(tmp_path / "float", out, recipe, [], lambda *_: None)
    with pytest.raises(UnsupportedModel, match="is quantised already"):
        quantise(out, tmp_path / "again", recipe, [], lambda *_: None)
    assert (out / "config.json").read_bytes() == before


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "float", **SHAPE)

    def fail(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(tmp_path / "float", tmp_path / "out", QuantiseRecipe(method="rtn", bits=4, group_size=64), [], fail)
    assert [file.name for file in tmp_path.iterdir()] == ["float"]
