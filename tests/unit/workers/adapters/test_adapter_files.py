"""An adapter's folder is refused by file, field or tensor, with a fix, unless it is valid."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from protos.errors import BadCheckpoint, BatonError, Misconfigured, UnsupportedModel
from workers.adapters.adapter_files import WEIGHTS, ModuleShape, read_adapter
from workers.adapters.names import parse_adapters
from workers.adapters.peft_config import CONFIG, MAX_CONFIG_BYTES, read_peft_config

MODULES = {
    f"model.layers.{layer}.self_attn.{name}": ModuleShape(num_inputs=8, num_outputs=outputs)
    for layer in range(2)
    for name, outputs in (("q_proj", 8), ("v_proj", 4))
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {}
    for name, shape in MODULES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.ones((4, shape.num_inputs), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.ones((shape.num_outputs, 4), np.float32)
    save_file(tensors, tmp_path / WEIGHTS)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False,
        "modules_to_save": None, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05, "rank_pattern": {},
        "layer_replication": None, "fan_in_fan_out": False, "alpha_pattern": {}, "init_lora_weights": True,
    }  # fmt: skip
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    return tmp_path


def configure(folder: Path, **fields: Any) -> None:
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(settings | fields))


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def test_a_plain_adapter_is_read(folder: Path) -> None:
    adapter = read_adapter(folder, MODULES)
    assert adapter.modules.keys() == MODULES.keys()
    assert {(module.rank, module.scale) for module in adapter.modules.values()} == {(4, 2.0)}
    assert adapter.num_bytes == 4 * 2 * (4 * 8 + 8 * 4 + 4 * 8 + 4 * 4)


def test_the_id_is_of_the_files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "adapter"
    shutil.copytree(folder, copy)
    first = read_adapter(folder, MODULES).adapter_id
    assert first == read_adapter(copy, MODULES).adapter_id
    configure(copy, lora_alpha=16)
    assert first != read_adapter(copy, MODULES).adapter_id


@pytest.mark.parametrize(
    ("fields", "module", "scale"),
    [
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.q_proj", 0.5),
        ({"alpha_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.v_proj", 2.0),
        ({"alpha_pattern": {r"layers\.1\..*": 4}}, "model.layers.1.self_attn.v_proj", 1.0),
        ({"alpha_pattern": {"_proj": 4}}, "model.layers.1.self_attn.v_proj", 2.0),
        ({"r": 2, "rank_pattern": {"v_proj": 16}}, "model.layers.1.self_attn.v_proj", 0.5),
    ],
)
def test_the_scale_is_pefts(folder: Path, fields: dict[str, Any], module: str, scale: float) -> None:
    configure(folder, **fields)
    assert read_peft_config(folder).scales(list(MODULES))[module][1] == scale


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"peft_type": "LOHA"},
        {"task_type": "SEQ_CLS"}, {"r": 513}, {"rank_pattern": {"q_proj": 513}}, {"init_lora_weights": "pissa_niter_4"},
        {"lora_alpha": "8"}, {"r": 0}, {"alpha_pattern": {"(": 1}}, {"rank_pattern": {r"((\w|\.)+)+!": 4}},
        {"alpha_pattern": {r"((\w|\.)+)+!": 4}}, {"lora_alpha": 10**400}, {"fan_in_fan_out": True},
    ],
)  # fmt: skip
def test_a_config_that_is_not_served_is_refused_by_field(folder: Path, fields: dict[str, Any]) -> None:
    configure(folder, **fields)
    with pytest.raises(Misconfigured) as refused:
        read_adapter(folder, MODULES)
    assert [refused.value.param] == [*fields]
    assert str(folder) in refused.value.message


def test_a_rank_that_contradicts_the_tensors_is_refused(folder: Path) -> None:
    configure(folder, r=3)
    with pytest.raises(BadCheckpoint, match=r"lora_A\.weight' is \(4, 8\).* \(3, 8\)"):
        read_adapter(folder, MODULES)


@pytest.mark.parametrize(
    ("old", "new", "kind", "match"),
    [
        ("q_proj", "k_proj", UnsupportedModel, "k_proj'.* q_proj, v_proj"),
        ("layers.1.", "layers.7.", UnsupportedModel, r"layers\.7\..*did you mean"),
        ("lora_A", "lora_embedding_A", UnsupportedModel, "adapts an embedding"),
        ("lora_A.weight", "lora_magnitude_vector", UnsupportedModel, "is DoRA's"),
        ("self_attn.q_proj.lora_A.weight", "self_attn.q_proj.weight", UnsupportedModel, "modules_to_save"),
        ("base_model.model.", "", UnsupportedModel, "names begin with 'base_model.model.'"),
        ("1.self_attn.v_proj.lora_B", "1.self_attn.v_proj.lora_A.default", BadCheckpoint, "no lora_B.weight"),
    ],
)
def test_tensors_of_other_kinds_are_refused_by_name(
    folder: Path, old: str, new: str, kind: type[BatonError], match: str
) -> None:
    rename(folder, old, new)
    with pytest.raises(kind, match=match):
        read_adapter(folder, MODULES)


def test_the_name_of_the_adapter_in_a_tensors_name_is_read_over(folder: Path) -> None:
    """A state dict that was saved without PEFT's save_pretrained has the name."""
    rename(folder, ".weight", ".default.weight")
    assert read_adapter(folder, MODULES).modules.keys() == MODULES.keys()


def test_pickles_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(BadCheckpoint, match=r"pickled adapter only \(adapter_model\.bin\).*safe_serialization"):
        read_adapter(folder, MODULES)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_or_damaged_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\0\0")
    with pytest.raises(BadCheckpoint, match=name):
        read_adapter(folder, MODULES)
    (folder / name).unlink()
    with pytest.raises(BadCheckpoint, match=f"{name} does not exist: give the folder"):
        read_adapter(folder, MODULES)
    for absent in ("absent", "long" * 100):
        with pytest.raises(BadCheckpoint, match="is no folder"):
            read_adapter(folder / absent, MODULES)


@pytest.mark.parametrize("kind", ["device", "fifo", "large"])
def test_a_config_that_has_no_end_is_refused(folder: Path, kind: str) -> None:
    content = (folder / CONFIG).read_text()
    (folder / CONFIG).unlink()
    if kind == "device":
        (folder / CONFIG).symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(folder / CONFIG)
    else:
        (folder / CONFIG).write_text(content + " " * MAX_CONFIG_BYTES)
    with pytest.raises(BadCheckpoint, match=CONFIG):
        read_adapter(folder, MODULES)


def test_a_model_of_transformers_takes_none(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="transformers computes"):
        read_adapter(folder, {})


def test_names_and_paths_of_a_setting() -> None:
    assert parse_adapters("a=/x/y, org:b-2 = z") == {"a": "/x/y", "org:b-2": "z"}
    assert parse_adapters("") == {}
    for text, match in {
        "a": "as NAME=PATH",
        "a b=/x": "cannot name",
        "a/b=/x": "cannot name",
        "a:latest=/x": "cannot name",
        "a=/x,a=/y": "given twice",
        "a=": "NAME=PATH",
    }.items():
        with pytest.raises(Misconfigured, match=match):
            parse_adapters(text)
