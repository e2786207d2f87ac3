"""llama.cpp's name of each tensor, by `general.architecture`. Source: llama.cpp, gguf-py/gguf/tensor_mapping.py and
conversion/*.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Projection = Literal["gate", "up", "down"]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_WHOLE = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Names of a layer's tensors that do not end alike."""

_EXPERTS: Mapping[str, tuple[Projection, ...]] = {
    "ffn_gate": ("gate",), "ffn_up": ("up",), "ffn_down": ("down",), "ffn_gate_up": ("gate", "up"),
}  # fmt: skip
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(\d+))?\.(weight|bias)")
_LAYER_OF = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesOfArchitecture:
    """`layer` has the names that differ from the usual ones; experts' projections are those of gate, up and down."""

    layer: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts"
    projections: Mapping[Projection, str] = field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    whole: Mapping[str, str] = field(default_factory=dict)  # as `layer`, of names that do not end alike
    norm_offset: float = 0.0  # that the converter added to the weights of norms


_GEMMA = NamesOfArchitecture(layer={"ffn_norm": "pre_feedforward_layernorm"}, norm_offset=1.0)
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_MIXTRAL = NamesOfArchitecture(
    layer={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts",
    projections={"gate": "w1", "up": "w3", "down": "w2"},
)
_USUAL = NamesOfArchitecture()
_NAMES = {
    "llama": _MIXTRAL,
    "minimax-m2": replace(_MIXTRAL, whole={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": NamesOfArchitecture(layer={"ffn_up": "mlp.gate_up_proj"}),
    "glm4": NamesOfArchitecture(
        layer={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }
    ),
    "glm4moe": NamesOfArchitecture(layer=_SHARED),
    "gpt-oss": NamesOfArchitecture(layer={"ffn_gate_inp": "mlp.router"}),
    "deepseek2": NamesOfArchitecture(layer=_SHARED),
    "starcoder2": NamesOfArchitecture(layer={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}


def names_of(architecture: str) -> NamesOfArchitecture:
    return _NAMES.get(architecture, _USUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """A tensor of experts: of all in a layer, or of number `expert`."""

    prefix: str  # of the experts' names in Hugging Face's checkpoint
    projections: tuple[str, ...]  # in order of its rows
    expert: int | None
    suffix: str  # weight or bias


def expert_tensor(name: str, names: NamesOfArchitecture) -> ExpertTensor | None:
    """`blk.0.ffn_up_exps.weight` has all experts of a layer; old files have `blk.0.ffn_up.3.weight` for each."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] is None:
        return None
    layer, own, number, suffix = match.groups()
    stem = own.removesuffix("_exps")
    if stem not in _EXPERTS or (number is None) == (stem == own):
        return None
    return ExpertTensor(
        prefix=f"model.layers.{layer}.{names.experts}",
        projections=tuple(names.projections[part] for part in _EXPERTS[stem]),
        expert=None if number is None else int(number),
        suffix=suffix,
    )


def translated(name: str, names: NamesOfArchitecture) -> str:
    """Hugging Face's name of a tensor. An unknown one keeps its own name after its layer's."""
    in_layer, match = _LAYER_OF.fullmatch(name), _NAME.fullmatch(name)
    if in_layer is None:
        return f"{_TOP[match[2]]}.{match[4]}" if match is not None and match[2] in _TOP and not match[3] else name
    layer, own = in_layer.groups()
    known = names.layer.get(match[2], _LAYER.get(match[2])) if match is not None and not match[3] else None
    whole = names.whole.get(own, _WHOLE.get(own))
    if whole is not None or known is None or match is None:
        return f"model.layers.{layer}.{whole or own}"
    return f"model.layers.{layer}.{known}.{match[4]}"
