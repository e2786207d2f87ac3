"""Quantised experts, one form of each format: the oracles are transformers models with the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gguf_models import convert
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.byte_encoder import in_bytes
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode, assert_near, assert_served
from tests.numerics.formats.test_rounded import by_the_rule
from tests.numerics.paged import PagedRun, in_chunks
from workers.kernels.cpu.native_build import native
from workers.models.loader import load_model
from workers.models.model_config import weight_bytes
from workers.weights.formats.gguf_blocks import QUANTISED, weight_of_blocks
from workers.weights.formats.mxfp4 import mxfp4_weight
from workers.weights.registry import open_source
from workers.weights.weight_formats import Quantize

LINEAR = re.compile(r".*(_proj|\.w[123])\.weight")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [40, 24]}


def oracle_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """The transformers model in `folder` with these weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def write_with_oracle(family: str, folder: Path, encode: Encode, config: dict[str, Any], **overrides: Any) -> Any:
    """A checkpoint in `folder` whose linear weights, experts among them, are encoded; routers are not."""
    floats = folder / "floats"
    make_checkpoint(family, floats, **overrides)
    tensors = load_file(floats / "model.safetensors")
    stored = {}
    for name, weight in list(tensors.items()):
        encoded = encode(name.removesuffix(".weight"), weight) if LINEAR.fullmatch(name) else None
        if encoded is None:
            stored[name] = weight
            continue
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{suffix}": tensor.contiguous().clone() for suffix, tensor in encoded[0].items()}
        tensors[name] = encoded[1]
    save_file(stored, folder / "model.safetensors")
    merged = json.loads((floats / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(merged))
    return oracle_of(floats, tensors)


@pytest.mark.parametrize(
    ("family", "encode", "config", "tp"),
    [
        ("mixtral", gptq(), gptq_config(), 2),
        ("qwen3_moe", awq(group_size=32), AWQ, 1),
        ("qwen3_moe", gptq(group_size=16, act_order=True), gptq_config(group_size=16, desc_act=True), 2),
    ],
    ids=["gptq", "awq", "act-order"],
)
def test_logits_equal_those_of_dequantised_experts(
    family: str, encode: Encode, config: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    oracle = write_with_oracle(family, tmp_path, encode, config)
    assert_served(tmp_path, oracle, tp=tp)


def test_experts_in_fp8_blocks_are_near(tmp_path: Path) -> None:
    encode = in_bytes("fp8", "block", block=(40, 24), scale_name="weight_scale_inv")
    oracle = write_with_oracle("qwen3_moe", tmp_path, encode, FP8)
    assert_near(tmp_path, oracle, correlation=0.99)


@pytest.mark.parametrize(("family", "levels"), [("mixtral", "int4"), ("qwen2_moe", "int8"), ("qwen3_moe", "fp8")])
@torch.no_grad()
def test_rounded_experts_and_exact_routers(family: str, levels: Quantize, tmp_path: Path) -> None:
    """`worker.quantize`: the bits a weight are those of the levels, the routers left in floating point."""
    make_checkpoint(family, tmp_path, hidden_size=128, intermediate_size=128)
    model = load_model(tmp_path, quantize=levels)
    assert float(model.stored_as.split(",")[1].split()[0]) < (6 if levels == "int4" else 10)
    assert weight_bytes(tmp_path, "float32", levels) < 0.6 * weight_bytes(tmp_path, "float32")
    tokens = random_tokens(33, seed=1)
    model.pack()
    ours = in_chunks(PagedRun(model, fused=native(torch.float32) is not None), tokens, [16, 3], prompt_len=19)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if LINEAR.fullmatch(name) or name.startswith("lm_head")]:
        proj = name if name.startswith("lm_head") else "experts_proj.weight"
        tensors[name] = by_the_rule(proj, tensors[name], levels)
    assert_close(ours, oracle_of(tmp_path, tensors)(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(
    ("family", "kind", "tp"), [("mixtral", "Q8_0", 2), ("qwen2_moe", "Q4_0", 1), ("qwen3_moe", "F16", 1)]
)
@torch.no_grad()
def test_experts_of_a_gguf_file_are_one_tensor(family: str, kind: str, tp: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / "hf")
    path = convert(tmp_path / "hf", tmp_path / "model.gguf", kind, others={"ffn_down": "F16"})
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    with open_source(path) as source:
        assert set(tensors) == set(source.names())
        for name in tensors:
            stored = source.describe(name)
            read = source.read(name, 0, slice(0, stored.shape[0]))
            tensors[name] = (
                weight_of_blocks(stored.dtype, read).dequantised() if stored.dtype in QUANTISED else read.float()
            )
    assert_served(path, oracle_of(tmp_path / "hf", tensors), tp=tp)


@pytest.mark.parametrize("tp", [1, 2])
@torch.no_grad()
def test_gpt_oss_in_mxfp4(tp: int, tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path / "floats", intermediate_size=64)
    tensors = load_file(tmp_path / "floats" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
        weights = [mxfp4_weight(*parts).dequantised() for parts in zip(blocks, scales, strict=True)]
        tensors[name] = torch.stack(weights).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert_served(tmp_path, oracle_of(tmp_path / "floats", tensors), tp=tp)


@torch.no_grad()
def test_stacks_as_transformers_holds_them(tmp_path: Path) -> None:
    """One tensor for gate and up of all experts is served like separate ones."""
    oracle: Any = make_checkpoint("qwen3_moe", tmp_path)
    state = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    assert_served(tmp_path, oracle)
