"""LoRA adapters with random matrices, in PEFT's files, and their model with W + s B A in place of each W."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path, folder: Path, *, rank: int = 4, targets: Sequence[str] = ALL_LINEAR, seed: int = 0, **config: Any
) -> Path:
    """Adapts every linear layer of the checkpoint `model` whose name ends in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)) and weight.dim() == 2:
            num_outputs, num_inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    settings |= {"task_type": "CAUSAL_LM", "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(model: Any, adapter: Path) -> Any:
    """The transformers `model` itself, its weights changed to W + s B A."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    divisor = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    with torch.no_grad():
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[name.replace("lora_A", "lora_B")]
                weight = model.get_submodule(module).weight
                weight += (up.double() @ down.double() * (config["lora_alpha"] / divisor)).to(weight.dtype)
    return model
