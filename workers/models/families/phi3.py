from __future__ import annotations

from workers.models.families.family import Family
from workers.models.families.layer_windows import one_window
from workers.models.families.traits import NormKind, TensorNames

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    windows=one_window,
    reads=frozenset({"partial_rotary_factor"}),
    defaults={"original_max_position_embeddings": 4096, "sliding_window": None},
    norm=NormKind(eps=1e-5),
    tensors=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
)
