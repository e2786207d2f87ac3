"""Experts in compiled code: the logits of transformers, and bits that do not depend on the batch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.values import FinishReason, GenerateRequest
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.engines import GREEDY, answer, colocated
from tests.numerics.paged import PagedRun, in_chunks
from workers.kernels.cpu.native_build import native
from workers.models.layers.expert_layer import MixtureOfExperts
from workers.models.loader import load_model
from workers.quantise.quantise import check_float_folder
from workers.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "shared-expert": ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "all-experts": ("qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False}),
    "groups-and-correction": ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 1.0}),
    "sinks-and-clamped-gates": ("gpt_oss", {}),
    "norms-over-all-heads": ("minimax_m2", {}),
    "uneven-sizes": ("qwen3_moe", {"hidden_size": 72, "moe_intermediate_size": 44}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_compiled_experts_have_the_oracles_logits(name: str, checkpoint: Checkpoint) -> None:
    family, overrides = MODELS[name]
    folder, oracle = checkpoint(family, **overrides)
    tokens = random_tokens(53, seed=1)
    model = load_model(folder)
    model.pack()
    run = PagedRun(model, fused=True)
    assert run.through is not None, "experts should run in the one-call step"
    assert_close(in_chunks(run, tokens, [16, 1, 24, 5], prompt_len=46), oracle(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(name: str, dtype: str, checkpoint: Checkpoint) -> None:
    family, overrides = MODELS[name]
    folder, _ = checkpoint(family, **overrides)
    model = load_model(folder, dtype=dtype)
    model.pack()
    sequences = [random_tokens(9 + 7 * n, seed=n) for n in range(5)]
    batch = PagedRun(model, fused=True)
    together = batch.step([(f"s{n}", tokens, len(tokens)) for n, tokens in enumerate(sequences)])
    for tokens, logits in zip(sequences, together, strict=True):
        assert torch.equal(in_chunks(PagedRun(model, fused=True), tokens, [5], prompt_len=len(tokens)), logits)


def test_experts_count_the_tokens_that_chose_them(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("qwen3_moe")
    counts = []
    for packed in (False, True):
        model = load_model(folder)
        if packed:
            model.pack()
        PagedRun(model, fused=packed).step([("one", random_tokens(40), 40)])
        layers = [part for layer in model._layers if isinstance(part := layer._mlp, MixtureOfExperts)]
        counts.append([layer.counts_X.tolist() for layer in layers])
    assert counts[0] == counts[1]
    assert [sum(layer) for layer in counts[0]] == [40 * 3, 40 * 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_a_router_that_overflows_breaks_its_token_alone(dtype: str, packed: bool, checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("qwen2_moe")
    model = load_model(folder, dtype=dtype)
    if packed:
        model.pack()
    layer = model._layers[0]._mlp
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).to(model.context.dtype)
    expected = layer(x)
    x[2] = 3e38 * x[2].sign()
    made = layer(x)
    others = [0, 1, 3, 4, 5]
    assert made[2].isnan().all()
    assert torch.equal(made[others], expected[others]) if packed else made[others].isfinite().all()


def test_a_router_that_is_not_finite_ends_only_its_request(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One token's hidden state overflows in the first layer; other requests continue unchanged."""
    make_checkpoint("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][150] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    config = WorkerConfig(model=str(tmp_path), dtype="float32", device="cpu", num_blocks=64, bind_cores="off")
    good, params = [random_tokens(20, seed=n) for n in range(2)], replace(GREEDY, max_tokens=8)
    good = [[min(token, 149) for token in prompt] for prompt in good]
    with colocated(config) as engine:
        alone = [answer(engine, [prompt], params)[0].token_ids for prompt in good]
    with colocated(config) as engine:
        for name, prompt in (("0", good[0]), ("broken", [5, 150, 7]), ("1", good[1])):
            engine.submit(GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params), now=0.0)
        tokens: dict[str, list[int]] = {"0": [], "broken": [], "1": []}
        errors: dict[str, str] = {}
        while engine.has_work():
            for update in engine.step(now=0.0):
                tokens[update.request_id] += update.token_ids
                if update.error is not None:
                    assert update.finish_reason is FinishReason.ERROR
                    errors[update.request_id] = update.error.code
            engine.check_integrity()
        engine.assert_idle()
        assert engine.load().expert_imbalance >= 1.0
    assert errors == {"broken": "not_finite"}
    assert tokens == {"0": alone[0], "broken": [], "1": alone[1]}


@pytest.mark.parametrize("change", ["missing", "narrow"])
def test_a_missing_expert_is_named_before_weights_are_read(change: str, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    whole = tensors.pop(name)
    if change == "narrow":
        tensors[name] = whole[:, :-4].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[tuple[int, int]] = []
    with pytest.raises(BadCheckpoint, match=re.escape(name)) as caught:
        load_model(tmp_path, on_progress=lambda *so_far: read.append(so_far))
    assert str(tmp_path) in caught.value.message
    assert not any(done for done, _ in read)


def test_baton_quantize_refuses_a_mixture_by_name(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"is a mixture of experts, .*set worker\.quantize"):
        check_float_folder(tmp_path)
