"""A LoRA adapter in PEFT's files, and its model with W + 2 B A in place of each W, without PEFT, which a lent machine
lacks. That PEFT merges the same is tested where it is installed (tests/numerics)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 2.0
_PREFIX = "base_model.model."


def write_adapter(model: Path, folder: Path, *, rank: int) -> Path:
    """Adapts every linear layer of the checkpoint `model`."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(LINEAR):
            num_outputs, num_inputs = weight.shape
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator) * 0.2
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * 0.2
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": list(LINEAR)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def with_adapter(model: Any, adapter: Path) -> Any:
    """The transformers `model` itself, with its weights changed."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                weight = model.get_submodule(name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")).weight
                up = tensors[name.replace("lora_A", "lora_B")]
                weight += (SCALE * (up.double() @ down.double())).to(weight.dtype)
    return model
