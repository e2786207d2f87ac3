"""All layers in one compiled call: the same bits as layer by layer, for everything a layer may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.paged import PagedRun
from workers.kernels.cpu.native_build import native
from workers.models.decoder import Decoder
from workers.models.loader import load_model
from workers.weights.encoding import LayerContext, Matrix, SideBySide, WeightShare
from workers.weights.formats.float_matrix import FloatEncoding

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler: layers run one by one")


def packed(folder: Path, family: str, dtype: str = "bfloat16", **overrides: Any) -> Decoder:
    make_checkpoint(family, folder, **overrides)
    decoder = load_model(folder, dtype=dtype)
    decoder.pack()
    return decoder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 64, "tie_word_embeddings": True}),
        ("llama", {"hidden_size": 80}),
        ("llama", {"hidden_size": 264, "intermediate_size": 300, "head_dim": 72}),
        ("llama", {"intermediate_size": 2048, "hidden_size": 2048}),
        ("qwen2", {"head_dim": 32}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("mistral", {"head_dim": 32}),
        ("mixtral", {}),
        ("qwen2_moe", {"decoder_sparse_step": 2, "hidden_size": 264, "num_key_value_heads": 4, "head_dim": 32}),
        ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": False}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("gemma2", {"head_dim": 32}),
        ("gemma3", {"num_hidden_layers": 2}),
        ("phi3", {"head_dim": 16, "rope_parameters": PARTIAL}),
        ("olmo2", {}),
        ("granite", {}),
        ("glm4", {}),
        ("smollm3", {"num_hidden_layers": 2}),
        ("cohere2", {}),
        ("gpt_oss", {}),
        ("starcoder2", {"sliding_window": 5}),
        ("starcoder2", {"use_bias": False, "hidden_act": "relu2", "hidden_size": 264, "intermediate_size": 300}),
        ("ministral3", {}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}),
        ("deepseek_v3", {"hidden_size": 264, "q_lora_rank": 36, "v_head_dim": 20}),
        ("glm4_moe_lite", {}),
    ],
    ids=[
        "small-heads",
        "tiles",
        "few-inputs",
        "inputs-that-fill-no-tile",
        "rows-apart",
        "biases",
        "norms-of-heads",
        "windows",
        "experts",
        "a-shared-expert-and-dense-layers",
        "many-experts",
        "biases-behind-each-product",
        "soft-caps",
        "two-ropes",
        "partial-rope",
        "norms-after-and-over-all-heads",
        "multipliers",
        "norms-before-and-after",
        "layers-without-rope",
        "parallel-halves",
        "sinks-and-biases",
        "an-mlp-without-a-gate-and-biases-of-norms",
        "another-activation-and-no-biases",
        "queries-that-grow",
        "latents",
        "latents-of-compressed-queries-that-fill-no-tile",
        "latents-and-a-dense-last-layer",
    ],
)
def test_the_same_bits_as_layer_by_layer(tmp_path: Path, family: str, overrides: dict[str, Any], dtype: str) -> None:
    decoder = packed(tmp_path, family, dtype, **overrides)
    runs = [PagedRun(decoder, fused=fused) for fused in (False, True)]
    assert runs[1].through is not None, "this model should have been fused"
    first = [("long", list(range(5, 75)), 70), ("short", [7, 8, 9], 3)]
    second = [("long", [76], 70), ("new", list(range(20, 50)), 30), ("short", [10], 3)]
    third = [("long", [77], 70), ("new", [51], 30), ("short", [11], 3)]
    for rows in (first, second, third):
        for one_by_one, fused in zip(*(run.step(rows) for run in runs), strict=True):
            assert torch.equal(one_by_one, fused)
    assert torch.equal(*(run.storage.data for run in runs))
    assert runs[1].told == [0, 1, 0, 1, 1], (
        "every layer of a prompt may travel at once, and a decode step is told as one"
    )


def test_unsupported_layers_run_one_by_one(tmp_path: Path) -> None:
    """An activation that only torch has, and one without a gate."""
    for activation in ("gelu", "relu2"):
        decoder = packed(tmp_path / activation, "llama", hidden_act=activation)
        assert PagedRun(decoder, fused=True).through is None


@pytest.mark.parametrize(("family", "overrides"), [("llama", {"hidden_size": 80}), ("qwen2", {"head_dim": 32})])
def test_weights_side_by_side_give_the_same_bits(
    tmp_path: Path, family: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerContext, "matrix", side_by_side)
    decoder = packed(tmp_path, family, **overrides)
    runs = [PagedRun(decoder, fused=fused) for fused in (False, True)]
    assert runs[1].through is not None, "this model should have been fused"
    for rows in ([("one", list(range(5, 75)), 70)], [("one", [76], 70), ("two", list(range(20, 50)), 30)]):
        for one_by_one, fused in zip(*(run.step(rows) for run in runs), strict=True):
            assert torch.equal(one_by_one, fused)


def side_by_side(context: LayerContext, share: WeightShare, *, gated: bool = False) -> Matrix:
    floats = FloatEncoding()
    shares = [replace(share, projections=(projection,)) for projection in share.projections]
    return SideBySide([floats.matrix(context, share) for share in shares], context.kernels, gated=gated)


def test_nothing_is_compiled_for_an_attention_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with such an attention neither wait for a compiler nor warn about it."""
    decoder = packed(tmp_path, "llama")
    monkeypatch.setattr("workers.runner.fused_layers.native", lambda _: pytest.fail("the CPU's kernels were asked for"))
    assert PagedRun(decoder, attention="torch", fused=True).through is None
