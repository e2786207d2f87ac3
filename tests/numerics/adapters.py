"""LoRA adapters with random matrices, made and merged by PEFT itself, which is imported where it is used: a machine
that is lent for its GPU lacks it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path, folder: Path, *, rank: int = 4, targets: Sequence[str] | str = ALL_LINEAR, seed: int = 0, **config: Any
) -> Path:
    """Adapts the linear layers of the checkpoint `model` that `targets` names, as in PEFT's `target_modules`; `config`
    are further fields of its LoraConfig."""
    import peft

    settings = {"lora_alpha": 2 * rank, "task_type": "CAUSAL_LM"} | config
    names = targets if isinstance(targets, str) else list(targets)
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=names, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder)
    return folder


def merged_model(model: PreTrainedModel, adapter: Path) -> Any:
    """The transformers `model` itself, its weights changed by the adapter."""
    import peft

    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
