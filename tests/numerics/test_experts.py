"""Experts in compiled code: the logits of transformers, and bits that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.conftest import Checkpoint, assert_close, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from workers.kernels.cpu.build import native
from workers.models.layers.experts import MixtureOfExperts
from workers.models.loader import load_model

pytestmark = pytest.mark.skipif(native(torch.float32) is None, reason="no C++ compiler")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "shared-expert": ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "all-experts": ("qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False}),
    "groups-and-correction": ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 1.0}),
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
