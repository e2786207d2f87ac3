from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.gemma2 import GEMMA_NORM, GEMMA_PLACES, gemma_scales
from workers.models.families.layer_ropes import ropes_by_type
from workers.models.families.layer_windows import windows_by_pattern

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 (text)",
    windows=windows_by_pattern,
    ropes=ropes_by_type,
    scales=gemma_scales,
    reads=frozenset({"attention_bias", "final_logit_softcapping", "query_pre_attn_scalar"}),
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    norm=GEMMA_NORM,
    places=GEMMA_PLACES,
    activation_field="hidden_activation",
    qk_norm="head",
)
