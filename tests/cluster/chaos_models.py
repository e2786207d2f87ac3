"""Checkpoints of random weights for clusters in chaos: the demo model's tokenizer, another cache of keys and values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.cluster.deployed import DEMO

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 2048, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip
WINDOWS = {
    "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": True, "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = {"windows": WINDOWS, "latent": LATENT}


def model_flags(name: str, folder: Path) -> tuple[str, ...]:
    """Flags of `baton up` that serve the model of this name as "demo"; "demo" is the demo model itself."""
    if name == "demo":
        return ()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SIZES, **MODELS[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(DEMO / file, folder)
    return ("--model", str(folder), "--served-name", "demo")
