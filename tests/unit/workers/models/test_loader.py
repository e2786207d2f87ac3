"""Every fault of a checkpoint's files is named before a weight is read."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from workers.kernels.device_kernels import kernels_for
from workers.models.decoder import Decoder
from workers.models.loader import load_model
from workers.models.model_config import read_config
from workers.parallel.group import Solo
from workers.weights.encoding import LayerContext
from workers.weights.formats.float_matrix import only_floats

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def expected_tensors(folder: Path) -> Tensors:
    """A random tensor for each that config.json requires."""
    context = LayerContext(
        device="cpu", dtype=torch.float32, parallel=Solo(), kernels=kernels_for("cpu"), encodings=only_floats
    )
    slots = Decoder(read_config(folder), context).slots()
    return {slot.name: torch.randn(slot.shape) for slot in slots}


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    write_config(tmp_path)
    return expected_tensors(tmp_path)


def weights(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    return ((slot.name, slot.target) for slot in decoder.slots())


def test_every_tensor_is_converted_and_counted(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    progress: list[tuple[int, int]] = []
    decoder = load_model(tmp_path, dtype="bfloat16", on_progress=lambda done, total: progress.append((done, total)))
    for name, weight in weights(decoder):
        assert torch.equal(weight, tensors[name].bfloat16()), name
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert progress[0] == (0, total)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)


def test_shards_load_like_one_file(tmp_path: Path, tensors: Tensors) -> None:
    files = {name: f"model-0000{1 + n % 3}-of-00003.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for name, weight in weights(load_model(tmp_path)):
        assert torch.equal(weight, tensors[name]), name
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00003\.safetensors is missing"):
        load_model(tmp_path)


def test_an_index_cannot_point_out_of_the_folder(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../elsewhere.safetensors")}))
    with pytest.raises(BadCheckpoint, match="'weight_map' must map tensor names to file names beside it"):
        load_model(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(None))
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin.*can run code.*save_pretrained"):
        load_model(tmp_path)


def test_a_folder_without_weights_names_the_missing_file(tmp_path: Path, tensors: Tensors) -> None:
    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path)


def test_a_gguf_file_beside_a_config_is_named(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(BadCheckpoint, match=r"holds model\.gguf and no \*\.safetensors: give --model .*model\.gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_is_no_damage(name: str, tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(
        BadCheckpoint, match=rf"{name} is a Git LFS pointer and not the file itself: run `git lfs pull`"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 200, -5])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated or damaged"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), r"'model\.layers\.0\.mlp\.up_proj"),
        (lambda t: t.pop("lm_head.weight"), r"'lm_head\.weight'"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(17)}),
            r"'model\.norm\.weight' is \(17,\), config\.json makes it \(16,\)",
        ),
    ],
    ids=["missing", "missing-head", "wrong-shape"],
)  # fmt: skip
def test_tensors_unlike_the_config_are_named_before_reading(
    spoil: Callable[[Tensors], object], says: str, tmp_path: Path, tensors: Tensors
) -> None:
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    progress: list[int] = []
    with pytest.raises(BadCheckpoint, match=says):
        load_model(tmp_path, on_progress=lambda done, _: progress.append(done))
    assert not progress


def test_quantised_weights_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'lm_head\.weight' is stored as F8_E4M3"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_weights_that_would_never_begin_are_refused(name: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadCheckpoint, match="FIFO"):
        load_model(tmp_path if name == "model.safetensors" else tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / name)
    with pytest.raises(BadCheckpoint, match="FIFO"):
        load_model(tmp_path / "linked")


def test_unused_tensors_are_reported_and_known_leftovers_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    tensors = expected_tensors(tmp_path)
    head = tensors["model.embed_tokens.weight"].clone()
    leftovers = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | leftovers, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path)
    assert not caplog.messages
    save_file(tensors | {"model.vision.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path)
    assert "1 tensors are not used, such as model.vision.weight" in caplog.text


def test_settings_nobody_can_serve_with_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Misconfigured, match="dtype 'int4' is not served: choose one of bfloat16, float32"):
        load_model(tmp_path, dtype="int4")
    with pytest.raises(Misconfigured, match="device 'meta' has no kernels: choose one of cpu, cuda"):
        load_model(tmp_path, device="meta")
