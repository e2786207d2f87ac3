"""Writes quantised checkpoints of tiny models. The oracles are transformers models with the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import assert_close, random_tokens
from tests.numerics.paged import PagedRun, in_chunks
from tests.numerics.test_tensor_parallel import on_ranks
from workers.kernels.cpu.native_build import native
from workers.kernels.device_kernels import kernels_for
from workers.models.loader import load_model
from workers.models.model_config import read_config
from workers.parallel.group import Solo, TensorParallel
from workers.weights.encoding import LayerContext, Matrix, Projection, WeightShare
from workers.weights.registry import encodings_of, open_source

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]
Encode = Callable[[str, torch.Tensor], Encoded | None]
"""From a layer's name and float weight [O, I] to the stored tensors by suffix and the weight that they stand for; None
leaves the layer in floating point."""


def write_quantised(
    family: str,
    folder: Path,
    encode: Encode,
    config: dict[str, Any] | None,
    *,
    head: bool = False,
    beside: dict[str, object] | None = None,
    **overrides: Any,
) -> Any:
    """The oracle. `config` becomes config.json's quantization_config, `beside` are other files."""
    oracle: Any = make_checkpoint(family, folder, **overrides)
    tensors = {}
    state = oracle.state_dict()
    for name, weight in state.items():
        layer = name.removesuffix(".weight")
        linear = layer.endswith(("_proj", "c_fc")) or (head and layer == "lm_head")
        encoded = encode(layer, weight) if linear and name.endswith(".weight") else None
        if encoded is None:
            if name != "lm_head.weight" or not oracle.config.tie_word_embeddings:
                tensors[name] = weight.clone()
            continue
        stored, dequantised = encoded
        tensors |= {f"{layer}.{suffix}": tensor.contiguous().clone() for suffix, tensor in stored.items()}
        weight.copy_(dequantised)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    extra = {} if config is None else {"quantization_config": config}
    file.write_text(json.dumps(json.loads(file.read_text()) | extra))
    for name, content in (beside or {}).items():
        (folder / name).write_text(json.dumps(content))
    return oracle


@torch.no_grad()
def assert_served(folder: Path, oracle: Any, *, tp: int = 1) -> None:
    """A whole prompt, and one that continues from the cache, have the oracle's logits on every rank. A single rank has
    compiled code for a whole step."""
    whole, tokens = random_tokens(33, seed=1), random_tokens(21)

    def program(group: TensorParallel) -> list[torch.Tensor]:
        decoder = load_model(folder, parallel=group)
        if tp == 1 and native(torch.float32) is not None:
            decoder.pack()
            assert decoder.packed_layers() is not None
        run = PagedRun(decoder, fused=True)
        return [run.step([("whole", whole, 33)])[0], in_chunks(run, tokens, [16, 3], prompt_len=19)]

    for logits in on_ranks(tp, program):
        for ours, ids in zip(logits, (whole, tokens), strict=True):
            theirs = oracle(torch.tensor([ids])).logits[0]
            assert_close(ours, theirs)
            assert torch.equal(ours.argmax(dim=1), theirs.argmax(dim=1))


@torch.no_grad()
def assert_near(folder: Path, oracle: Any, *, tp: int = 1, correlation: float = 0.998) -> None:
    """Allows for inputs that differ in their last bit and are rounded to another level, a large step in a small
    model."""
    tokens = random_tokens(33, seed=1)

    def program(group: TensorParallel) -> torch.Tensor:
        return PagedRun(load_model(folder, parallel=group)).step([("only", tokens, 33)])[0]

    every_rank = on_ranks(tp, program)
    assert all(torch.equal(logits, every_rank[0]) for logits in every_rank)
    both = torch.stack([every_rank[0].flatten(), oracle(torch.tensor([tokens])).logits[0].flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > correlation


def dequantised_weight(oracle: Any, name: str) -> torch.Tensor:
    weight: torch.Tensor = oracle.state_dict()[f"{name}.weight"]
    return weight


def matrix_of(folder: Path, name: str, num_outputs: int, num_inputs: int) -> Matrix:
    """One linear layer of the checkpoint, whole, filled and packed for float32."""
    with open_source(folder) as source:
        context = LayerContext(
            device="cpu",
            dtype=torch.float32,
            parallel=Solo(),
            kernels=kernels_for("cpu"),
            encodings=encodings_of(read_config(folder).weight_format, source),
        )
        part = Projection(name=name, total=num_outputs, start=0, size=num_outputs)
        share = WeightShare(projections=(part,), total_inputs=num_inputs, first_input=0, num_inputs=num_inputs)
        matrix = context.matrix(share)
        for slot in matrix.slots():
            assert source.describe(slot.name).shape == slot.shape
            slot.target.copy_(source.read(slot.name, slot.dim, slot.part))
    matrix.pack()
    return matrix
