"""Latent attention in the engine: a token's bits do not depend on how its sequence was cut, and the log says what of a
checkpoint is left out."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import UnsupportedModel
from protos.values import SamplingParams
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import answer, colocated
from tests.numerics.moving import moved, pulled, two
from tests.numerics.paged import PagedRun, in_chunks
from workers.kernels.cpu.native_build import native
from workers.models.loader import load_model
from workers.models.model_config import read_config, weight_bytes
from workers.quantise.quantise import check_float_folder
from workers.worker_config import WorkerConfig


@pytest.mark.skipif(native(torch.bfloat16) is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_recomputed_token_has_the_bits_of_the_decoded_one(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    folder, _ = checkpoint(family, first_k_dense_replace=2)
    tokens = random_tokens(150)
    model = load_model(folder, dtype=dtype)
    model.pack()
    run = PagedRun(model, fused=True)
    assert run.through is not None, "latents should run in the one-call step"
    decoded = in_chunks(run, tokens, [70, 16, 3], prompt_len=89)
    assert torch.equal(PagedRun(model, fused=True).step([("only", tokens, 150)])[0], decoded)


def test_latent_sequences_move_and_return_from_the_host(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("deepseek_v3", first_k_dense_replace=2)
    few = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt, config = random_tokens(100, 5), WorkerConfig(model=str(folder), num_blocks=40, max_model_len=160)
    with colocated(config) as engine:
        expected = answer(engine, [prompt], few)[0].token_ids
        again = answer(engine, [prompt], few)[0]
        assert (again.token_ids, again.num_cached_tokens) == (expected, 96)
    with two(config) as (old, new):
        assert moved(old, new, prompt, few, num_before=9) == expected
    with two(config) as (old, new):
        assert pulled(old, new, prompt, few) == (expected, 96)
    with colocated(replace(config, num_blocks=10, host_kv_gib=0.01)) as small:
        answer(small, [prompt], few)
        answer(small, [random_tokens(150, 7)], few)
        assert answer(small, [prompt], few)[0].token_ids == expected
        load = small.load().host
        assert load is not None
        assert load.num_hit_tokens >= 64


def test_baton_quantize_refuses_latent_attention_by_name(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("deepseek_v3")
    with pytest.raises(UnsupportedModel, match=r"how deepseek_v3 stores .*set worker\.quantize"):
        check_float_folder(folder)


def test_a_latent_cache_has_one_vector_per_token_and_layer(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("deepseek_v3")
    layout = read_config(folder).kv_layout(block_size=16, dtype="bfloat16", tp=4)
    assert layout.block_bytes == 2 * 16 * (32 + 8) * 2
    assert layout.num_kv_heads == 1


def test_mtp_layers_are_left_out_and_logged(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint("deepseek_v3")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="baton.worker"):
        load_model(tmp_path)
    assert "layers for multi-token prediction (2) are not loaded" in caplog.text
    assert "not used" not in caplog.text
    assert weight_bytes(tmp_path, "float32") == weight_bytes(folder, "float32")


@torch.no_grad()
def test_fp8_weights_are_dequantised_exactly_to_be_absorbed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Blocks of 128 x 128 as DeepSeek stores them, the last ones partial, for kv_b_proj alone."""
    folder, oracle = checkpoint("deepseek_v3", kv_lora_rank=160, first_k_dense_replace=2)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, rounded = load_file(folder / "model.safetensors"), copy.deepcopy(oracle)
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        rows, inputs = tensors[name].shape
        scale = torch.rand(-(-rows // 128), -(-inputs // 128)) * 0.01 + 0.001
        of_weight = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :inputs]
        tensors[name] = (tensors[name] / of_weight).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale_inv")] = scale
        rounded.get_parameter(name).copy_(tensors[name].float() * of_weight)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = random_tokens(20)
    ours = PagedRun(load_model(tmp_path)).step([("only", tokens, 20)])[0]
    assert_close(ours, rounded(torch.tensor([tokens])).logits[0])
