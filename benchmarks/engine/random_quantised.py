"""Writes a Llama of random quantised weights: the bytes are drawn as they are stored, so that nothing is rounded.

The head stays in bfloat16, as in published checkpoints. The weights have a deviation of about 0.02, as the float
model's of `random_llama.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine.random_llama import CONFIG, shapes

GROUP = 128
LARGE_CONFIG = CONFIG | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
"""1.53 billion parameters in 24 layers, and a head that is tied to the embedding."""

Stored = Mapping[str, torch.Tensor]


def write_quantised(folder: Path, method: str, config: dict[str, Any] = CONFIG, *, seed: int = 0) -> None:
    """A Hugging Face checkpoint in `folder`, made if need be. `method`: "gptq", "awq" or "w8a8"."""
    draw, settings = METHODS[method]
    folder.mkdir(parents=True, exist_ok=True)
    chance = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.{suffix}": stored for suffix, stored in draw(chance, *shape).items()}
        else:
            tensors[name] = (torch.randn(shape, generator=chance) * 0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}, indent=2))


def _words(chance: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=chance, dtype=torch.int64).int()


def _scales(*shape: int, levels: int) -> torch.Tensor:
    """Levels that are drawn evenly then have a deviation of 0.02."""
    return torch.full(shape, 0.02 * 12**0.5 / levels, dtype=torch.float16)


def _gptq(chance: torch.Generator, outputs: int, inputs: int) -> Stored:
    groups = inputs // GROUP
    return {
        "qweight": _words(chance, inputs // 8, outputs),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(groups, outputs, levels=16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _awq(chance: torch.Generator, outputs: int, inputs: int) -> Stored:
    groups = inputs // GROUP
    return {
        "qweight": _words(chance, inputs, outputs // 8),
        "qzeros": _words(chance, groups, outputs // 8),
        "scales": _scales(groups, outputs, levels=16),
    }


def _w8a8(chance: torch.Generator, outputs: int, inputs: int) -> Stored:
    weight = torch.randint(-127, 128, (outputs, inputs), generator=chance, dtype=torch.int8)
    return {"weight": weight, "weight_scale": _scales(outputs, 1, levels=256).bfloat16()}


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
METHODS: Mapping[str, tuple[Callable[[torch.Generator, int, int], Stored], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
    ),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "w8a8": (
        _w8a8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                    "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
                }
            },
        },
    ),
}
