"""A model family as values: which fields of config.json it reads, and what its layers do other than Llama's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protos.model_files.fields import Fields
from workers.models.families.experts_config import ExpertsConfig
from workers.models.families.latent_config import LatentConfig
from workers.models.families.layer_ropes import Ropes, RopeSizes, one_rope
from workers.models.families.layer_windows import Windows, no_windows
from workers.models.families.traits import (
    LLAMA_NAMES,
    NORMS_BEFORE,
    RMS_NORM,
    NormKind,
    NormPlaces,
    QKNorm,
    Scales,
    TensorNames,
    no_scales,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str  # config.json's model_type
    architecture: str
    models: str  # the published models of this architecture, for users
    windows: Callable[[Fields, int], Windows] = no_windows
    ropes: Callable[[Fields, Windows, RopeSizes], Ropes] = one_rope
    scales: Callable[[Fields], Scales] = no_scales
    latent: Callable[[Fields], LatentConfig] | None = None  # None: the cache keeps keys and values
    experts: Callable[[Fields, int], ExpertsConfig | None] | None = None  # None: the family has none
    reads: frozenset[str] = frozenset()  # fields that only some families may set, such as attention_bias
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json leaves out
    norm: NormKind = RMS_NORM
    norm_eps_field: str = "rms_norm_eps"
    places: NormPlaces = NORMS_BEFORE
    tensors: TensorNames = LLAMA_NAMES
    activation_field: str = "hidden_act"
    gated: bool = True  # the MLP is down(activation(gate(x)) * up(x)), else down(activation(up(x)))
    interleaved_rope: bool = False  # neighbouring dimensions of a head turn together, not those half a head apart
    rotary_dim_field: str | None = None  # the number of dimensions that turn, in place of partial_rotary_factor
    attention_bias_field: str = "attention_bias"
    mlp_bias_field: str = "mlp_bias"
    o_bias: bool = True  # the attention's output has a bias if queries, keys and values have one by that field
    qkv_bias: bool = False  # always, without a field of config.json
    qk_norm: QKNorm | None = None
    qk_norm_field: str | None = None  # the field that turns it on; None: always on
    sinks: bool = False  # an extra logit of each query head's softmax
    head_dim: int | None = None  # None: hidden size / heads, unless config.json has another

    @property
    def stored_as_llama(self) -> bool:
        """Whether tensors are stored as Llama's of the same name: not fused, and with rows in the same order."""
        same = (self.places, self.tensors) == (NORMS_BEFORE, LLAMA_NAMES) and not self.norm.offset
        return same and self.latent is None and not self.interleaved_rope and "partial_rotary_factor" not in self.reads

    @property
    def mlp_projections(self) -> int:
        """2 or 3: with a gate."""
        return 3 if self.gated else 2
