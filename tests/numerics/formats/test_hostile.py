"""Spoiled configs and headers of every format: they are served or refused by a typed error, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import BatonError
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.bitsandbytes_encoder import int8_rows, nf4
from tests.numerics.formats.byte_encoder import in_bytes
from tests.numerics.formats.compressed_encoder import config_of, floats, integers, packed
from tests.numerics.formats.exl2_encoder import exl2
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import write_quantised
from workers.models.loader import load_model

BNB = {"quant_method": "bitsandbytes"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq(act_order=True), gptq_config(desc_act=True, dynamic={r"-:.*\.up_proj": {}})),
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "packed": (packed(symmetric=False), config_of("pack-quantized", integers(4, "group", 32, symmetric=False))),
    "w8a8": (in_bytes("int8", "channel"), config_of("int-quantized", integers(8, "channel"), TOKEN)),
    "fp8": (
        in_bytes("fp8", "block", block=(32, 32)),
        config_of("float-quantized", floats("block", block_structure=[32, 32])),
    ),
    "deepseek": (
        in_bytes("fp8", "block", block=(32, 32), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    ),
    "int8": (int8_rows, BNB | {"load_in_8bit": True}),
    "nf4": (nf4(nested=True), BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "exl2": (exl2(), {"quant_method": "exl2", "bits": 4.5}),
}
NUMBERS = st.sampled_from([-(1 << 63), -2, -1, 0, 1, 2, 3, 5, 7, 16, 33, 64, 128, 1 << 31, 1 << 62, 1 << 70])
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=6), st.just([]), st.just({}),
    st.lists(NUMBERS, max_size=3), st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
    st.sampled_from(["int", "float", "group", "channel", "tensor", "block", "token", "re:(", "re:.*", "gptq_v2"]),
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FORMATS}
    for name, (encode, config) in FORMATS.items():
        write_quantised("llama", made[name], encode, config, num_hidden_layers=1)
    return made


def load(folder: Path) -> None:
    refusal = ""
    try:
        load_model(folder).pack()
    except BatonError as error:
        refusal = error.message
    assert not refusal or str(folder) in refusal or "tensor" in refusal, refusal


def spoiled(data: st.DataObject, value: Any) -> Any:
    """A config with one place changed or removed."""
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.booleans()) or not isinstance(value[key], dict | list):
            return {**value, key: data.draw(VALUES)} if data.draw(st.integers(0, 5)) else {
                name: item for name, item in value.items() if name != key
            }  # fmt: skip
        return {**value, key: spoiled(data, value[key])}
    if isinstance(value, list) and value:
        return [*value[:-1], spoiled(data, value[-1])]
    return data.draw(VALUES)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_no_spoiled_config_does_more_than_raise(name: str, folders: dict[str, Path], data: st.DataObject) -> None:
    file = folders[name] / "config.json"
    original = file.read_text()
    config = json.loads(original)
    config["quantization_config"] = spoiled(data, config["quantization_config"])
    try:
        file.write_text(json.dumps(config))
        load(folders[name])
    finally:
        file.write_text(original)


@pytest.mark.parametrize("name", ["gptq", "nf4", "exl2", "packed"])
@settings(max_examples=25)
@given(data=st.data())
def test_no_spoiled_header_or_tensor_does_more_than_raise(
    name: str, folders: dict[str, Path], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Changes bytes of shapes, names and offsets in the header, and of the tensors."""
    folder = tmp_path_factory.mktemp("spoiled")
    shutil.copy(folders[name] / "config.json", folder)
    content = bytearray((folders[name] / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(header, len(content) - 1)))
        content[place] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content[: data.draw(st.sampled_from([len(content)] * 4 + [header, 9]))])
    load(folder)
    shutil.rmtree(folder)


def test_a_model_of_each_format_is_served_to_begin_with(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        decoder = load_model(folder)
        decoder.pack()
        assert decoder.stored_as
    assert torch.get_default_dtype() == torch.float32
