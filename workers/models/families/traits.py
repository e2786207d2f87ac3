"""Ways in which a decoder may differ from Llama, as values. A family sets them, some from fields of its config.json.
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.model_files.fields import Fields

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
QKNorm = Literal["head", "all"]
"""RMS norm of queries and keys: of each head alone, or of all heads together."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
"""By the names of transformers' ACT2FN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """RMS norm, or, `centred`, layer norm (https://arxiv.org/abs/1607.06450)."""

    centred: bool = False
    bias: bool = False  # of a layer norm
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weights, which Gemma stores less one
    wide: bool = False  # times the weight in float32, rounded once; else rounded before the weight and after


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlaces:
    """Names of a layer's norms; None: there is none at this place.

        h = before_attention(x);  x += after_attention(attention(h))
        h = before_mlp(x);        x += after_mlp(mlp(h))

    `parallel`: the MLP reads the attention's input, and both are added at once. It has no other norms.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a layer's linear weights. One name where several projections are expected: the checkpoint has them
    fused, in this order."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries at position p are times 1 + beta * ln(1 + floor(p / length)): Llama 4's scale for long contexts."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors and soft caps: a soft cap of c makes c * tanh(x / c) of x, 0 is none."""

    embedding: float = 1.0  # rounded to the weights' type before it is used
    residual: float = 1.0  # of what each half of a layer adds
    attention: float | None = None  # of queries times keys; None: head size ** -0.5
    attention_softcap: float = 0.0
    logits: float = 1.0
    logits_softcap: float = 0.0
    growth: QueryGrowth | None = None  # of queries


RMS_NORM, NORMS_BEFORE, LLAMA_NAMES = NormKind(), NormPlaces(), TensorNames()
NORMS_AFTER = NormPlaces(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
"""Norms of OLMo 2 and EXAONE 4."""


def no_scales(config: Fields) -> Scales:
    return Scales()


def read_activation(config: Fields, field: str) -> Activation:
    """Absent it is silu. Raises UnsupportedModel for a function that is not known."""
    name = config.text_or(field, "silu")
    if name not in _ACTIVATIONS:
        raise config.unserved(field, f"known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
