"""Model families as specs over one decoder stack: which parts a family has, and which fields of config.json say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import BadCheckpoint, UnsupportedModel
from workers.models.fields import Fields

Windows = tuple[int | None, ...]
"""Per layer: how many positions a token sees, itself included; None sees all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`reads_attention_bias`: the checkpoint may ask for biases on q, k, v and o; `reads_mlp_bias` likewise.

    `head_dim` None: hidden size / heads unless config.json says otherwise.
    """

    name: str
    architecture: str
    windows: Callable[[Fields, int], Windows]
    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    head_dim: int | None = None


def _no_windows(config: Fields, num_layers: int) -> Windows:
    if "sliding_window" in config or "layer_types" in config:
        raise UnsupportedModel(
            f"{config.where}: sliding_window and layer_types have no meaning for this family: use the original file",
            param="sliding_window",
        )
    return (None,) * num_layers


def _one_window(config: Fields, num_layers: int) -> Windows:
    """Mistral: every layer alike. An absent field means 4096, an explicit null means none."""
    if "layer_types" in config:
        raise UnsupportedModel(f"{config.where}: layer_types is not supported for Mistral", param="layer_types")
    absent = None if config.has_null("sliding_window") else 4096
    return (config.integer_or("sliding_window", absent),) * num_layers


def _windows_by_layer(config: Fields, num_layers: int) -> Windows:
    """Qwen: `layer_types`, or else the layers from `max_window_layers` on, if `use_sliding_window` says so."""
    window = config.integer_or("sliding_window", 4096) if config.flag("use_sliding_window") else None
    types = config.texts("layer_types")
    if not types:
        first = config.integer_or("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(types) != num_layers:
        raise BadCheckpoint(f"{config.where}: layer_types has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{config.where}: layer type {kind!r} is not supported", param="layer_types")
        if kind == "sliding_attention" and window is None:
            raise BadCheckpoint(f"{config.where}: layer_types has sliding layers, use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        windows=_no_windows,
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
    Family(name="mistral", architecture="MistralForCausalLM", windows=_one_window),
    Family(name="qwen2", architecture="Qwen2ForCausalLM", windows=_windows_by_layer, qkv_bias=True),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        windows=_windows_by_layer,
        qk_norm=True,
        reads_attention_bias=True,
        head_dim=128,
    ),
)


def family_of(config: Fields) -> Family:
    """The family that config.json names in `architectures`, or in `model_type` when there is no such list."""
    named = config.texts("architectures")
    for family in FAMILIES:
        if named == (family.architecture,) or (not named and config.text_or("model_type", "") == family.name):
            return family
    what = f"architectures {list(named)}" if named else f"model_type {config.raw('model_type')!r}"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(
        f"{config.where}: {what} is not supported: known are {known} (Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and "
        "Qwen3, dense and for text). Give --model a checkpoint of one of these",
        param="architectures",
    )
