from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_windows import one_window
from workers.models.families.traits import NormKind, TensorNames

FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    windows=one_window,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    norm=NormKind(centred=True, bias=True, eps=1e-5),
    norm_eps_field="norm_epsilon",
    tensors=TensorNames(gate_up=("c_fc",), down="c_proj"),
    gated=False,
    attention_bias_field="use_bias",
    mlp_bias_field="use_bias",
)
