"""The demo model in files of several formats: what it forgets by them, and that it still answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo.held_out import load
from demo.measure import Logits, answer, loss_of
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.byte_encoder import in_bytes
from tests.numerics.formats.compressed_encoder import config_of, integers
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model

DEMO = Path(__file__).parents[3] / "demo" / "model"
QUESTION, FIRST_LINE = (
    "What does `os.path.exists` do?",
    "Test whether a path exists.  Returns False for broken symbolic links",
)
CPU = torch.device("cpu")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W8A8 = config_of(
    "int-quantized",
    integers(8, "channel"),
    {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
)


def write_demo(folder: Path, encode: Encode, config: dict[str, Any]) -> None:
    """A copy of the demo model with its linear layers encoded."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(DEMO / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        encoded = encode(layer, weight.float()) if layer.endswith("_proj") else None
        stored = {"weight": weight} if encoded is None else encoded[0]
        tensors |= {f"{layer}.{suffix}": tensor.contiguous().clone() for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))


def logits_of(folder: Path) -> Logits:
    model = load_model(folder)

    def logits(ids_1T: torch.Tensor) -> torch.Tensor:
        ids = ids_1T[0].tolist()
        return PagedRun(model, num_blocks=128).step([("only", ids, len(ids))])[0][None]

    return logits


@cache
def held_out_loss(folder: Path) -> float:
    """Nats a token."""
    texts = load(DEMO)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return loss_of(logits_of(folder), tokenizer, [*texts.source[:2], *texts.chat[:6]], CPU).nats


@pytest.mark.parametrize(
    ("encode", "config", "most"),
    [
        (gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True), 1.04),
        (awq(32), AWQ, 1.04),
        (in_bytes("fp8", "block", block=(128, 128), scale_name="weight_scale_inv"), FP8, 1.01),
        (in_bytes("int8", "channel"), W8A8, 1.01),
    ],
    ids=["gptq", "awq", "fp8", "w8a8"],
)
def test_the_demo_model_forgets_little_and_answers(
    encode: Callable[..., Any], config: dict[str, Any], most: float, tmp_path: Path
) -> None:
    write_demo(tmp_path, encode, config)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    said = answer(logits_of(tmp_path), tokenizer, QUESTION, CPU, max_tokens=18)
    assert said.startswith(FIRST_LINE)
    assert held_out_loss(tmp_path) <= most * held_out_loss(DEMO)
