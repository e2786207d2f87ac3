from __future__ import annotations

from protos.model_files.fields import Fields
from workers.models.families.family import Family
from workers.models.families.layer_ropes import rope_where_windowed
from workers.models.families.layer_windows import windows_by_pattern
from workers.models.families.traits import NormKind, NormPlaces, Scales


def _scales(config: Fields) -> Scales:
    return Scales(logits=config.number_or("logit_scale", 1.0))


FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    models="Command R7B, Command A",
    windows=windows_by_pattern,
    ropes=rope_where_windowed,
    scales=_scales,
    reads=frozenset({"attention_bias", "logit_scale"}),
    defaults={
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    norm=NormKind(centred=True, eps=1e-5),
    norm_eps_field="layer_norm_eps",
    places=NormPlaces(before_mlp=None, parallel=True),
    interleaved_rope=True,
)
