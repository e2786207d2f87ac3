"""GPTQ against checkpoints encoded by the format's rules, served in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.folder import FolderFiles
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encoded, assert_served, write_quantised
from workers.models.loader import load_model

UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "sizes", "config", "tp", "overrides"),
    [
        ("llama", {}, {}, 1, UNTIED),
        ("llama", {"act_order": True}, {"desc_act": True}, 2, TIED),
        ("llama", {"bits": 3, "symmetric": True}, {"bits": 3, "sym": True}, 2, UNTIED),
        ("mistral", {"bits": 8, "version": 2}, {"bits": 8, "checkpoint_format": "gptq_v2"}, 2, UNTIED),
        ("mistral", {"bits": 3, "act_order": True}, {"bits": 3, "desc_act": True}, 1, UNTIED),
        ("qwen2", {"group_size": -1, "bare": True}, {"group_size": -1}, 2, TIED),
        ("qwen2", {"bits": 2, "symmetric": True}, {"bits": 2, "sym": True}, 1, UNTIED),
        ("qwen3", {"group_size": 64, "bare": True, "version": 2}, {"group_size": 64, "format": "gptq_v2"}, 2, UNTIED),
    ],
    ids=["plain", "act-order-tp2", "3-bit-tp2", "v2-8-bit-tp2", "3-bit-act-order", "one-group-tp2", "2-bit", "v2-tp2"],
)
def test_logits_equal_those_of_dequantised_weights(
    family: str, sizes: dict[str, Any], config: dict[str, Any], tp: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    oracle = write_quantised(family, tmp_path, gptq(**sizes), gptq_config(**config), **overrides)
    assert_served(tmp_path, oracle, tp=tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_may_differ_and_the_head_may_be_quantised(tp: int, tmp_path: Path) -> None:
    """`dynamic`: k_proj has other bits than q and v, up_proj is stored as floats, gate is not. Compiled code takes
    groups of 16 inputs only of 2, 3 and 6 bits."""

    def encode(name: str, weight: torch.Tensor) -> Encoded | None:
        if name.endswith("up_proj"):
            return None
        bits, size = (8, 16) if name.endswith("k_proj") else (4, 32)
        return gptq(bits, size, act_order=name.endswith("v_proj"))(name, weight)

    dynamic = {r"+:.*\.k_proj": {"bits": 8, "group_size": 16}, r"-:.*up_proj.*": {}}
    config = gptq_config(dynamic=dynamic, lm_head=True, desc_act=True)
    oracle = write_quantised("llama", tmp_path, encode, config, head=True, vocab_size=161)
    assert_served(tmp_path, oracle, tp=tp)


def test_a_config_beside_config_json_is_read(tmp_path: Path) -> None:
    config = {key: value for key, value in gptq_config().items() if key != "quant_method"}
    oracle = write_quantised("llama", tmp_path, gptq(), None, beside={"quantize_config.json": config})
    assert_served(tmp_path, oracle)
    assert load_model(tmp_path).stored_as == "gptq-int4-g32, 8.964 bits a weight"
    before = FolderFiles(tmp_path).fingerprint()
    (tmp_path / "quantize_config.json").write_text(json.dumps(config | {"checkpoint_format": "gptq_v2"}))
    assert FolderFiles(tmp_path).fingerprint() != before


@pytest.mark.parametrize("tp_part", [slice(None), slice(0, 4)])
def test_zeros_of_all_ones_are_refused_by_name(tp_part: slice, tmp_path: Path) -> None:
    write_quantised("llama", tmp_path, gptq(), gptq_config())
    change(tmp_path, "model.layers.1.mlp.up_proj.qzeros", lambda words: words[0, tp_part].fill_(-1))
    progress: list[int] = []
    with pytest.raises(UnsupportedModel, match=r"up_proj\.qzeros' has zero points whose 4 bits are all ones.*gptq_v2"):
        load_model(tmp_path, on_progress=lambda done, total: progress.append(2 * done > total))
    assert not any(progress)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_model_does_not_have_must_be_zero(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def encode(name: str, weight: torch.Tensor) -> Encoded | None:
        stored, dequantised = gptq()(name, weight) or ({}, weight)
        return stored | {"bias": torch.full((len(weight),), value).half()}, dequantised

    oracle = write_quantised("llama", tmp_path, encode, gptq_config())
    if value:
        with pytest.raises(UnsupportedModel, match=r"_proj\.bias' is a bias, and config\.json makes"):
            load_model(tmp_path)
        return
    assert_served(tmp_path, oracle)
    assert "not used" not in caplog.text


def test_groups_out_of_range_are_refused(tmp_path: Path) -> None:
    write_quantised("llama", tmp_path, gptq(), gptq_config())
    change(tmp_path, "model.layers.0.self_attn.k_proj.g_idx", lambda groups: groups[3].fill_(7))
    with pytest.raises(BadCheckpoint, match=r"k_proj\.g_idx' has groups 0 to 7, and scales of 2 groups"):
        load_model(tmp_path)


def test_sizes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    write_quantised("llama", tmp_path, gptq(), gptq_config(group_size=16))
    with pytest.raises(BadCheckpoint, match=r"tensor '.*qzeros' is \(2, 8\), config\.json makes it \(4, 8\)"):
        load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 40, "head_dim": 16}))
    with pytest.raises(BadCheckpoint, match=r"config\.json makes it"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1 << 40}))
    with pytest.raises(BadCheckpoint, match=f"'num_hidden_layers' is {1 << 40}.* 4096"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4096}))
    with pytest.raises(BadCheckpoint, match=r"fewer than the 4096 layers in config\.json"):
        load_model(tmp_path)


def change(folder: Path, name: str, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors")
