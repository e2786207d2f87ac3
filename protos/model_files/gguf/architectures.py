"""The architectures of GGUF files, by `general.architecture`: which class of transformers each is, and how the keys
below its name become fields of config.json.

Keys and what their absence means: llama.cpp, conversion/*.py and src/models/*.cpp (`load_arch_hparams`), October 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from protos.model_files.gguf.metadata import GGUFArray

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFacts:
    """A file's description of its model, for the fields that need more than one key."""

    own: Fields  # keys below the architecture's name
    tensors: frozenset[str]
    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope: Config  # rope_parameters

    def biased(self, name: str) -> bool:
        return f"blk.0.{name}.bias" in self.tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture. `fields` makes fields that differ between architectures. Keys in `reads` may change what the
    layers compute: other architectures refuse them."""

    served_as: str
    models: str
    fields: Callable[[GGUFFacts], Config] = lambda facts: {}
    reads: frozenset[str] = field(default_factory=frozenset)
    permuted: bool = False  # rows of queries and keys are in the order in which llama.cpp rotates neighbours
    norm_eps: str = "rms_norm_eps"  # the field of config.json; any other field means layer norm


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_GRANITE_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _windows(facts: GGUFFacts, pattern: int) -> Config:
    """Reads windows: each `pattern`-th layer has none. The file may list the layers, or give another number."""
    window = facts.own.integer_or(WINDOW, 0, minimum=0)
    given, layers = facts.own.raw(PATTERN), range(facts.num_layers)
    if window == 0:
        return {"sliding_window": None}
    if isinstance(given, GGUFArray):
        listed = given.values()
        if len(listed) < len(layers):
            raise BadCheckpoint(f"{facts.own.where}.{PATTERN} has {len(listed)} values for {len(layers)} layers")
        slides = [bool(listed[layer]) for layer in layers]
    elif isinstance(given, bool):
        slides = [given] * len(layers)
    else:
        pattern = facts.own.integer_or(PATTERN, pattern, minimum=0)
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in layers]
    types = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"sliding_window": window, "layer_types": types}


def _biases(facts: GGUFFacts) -> Config:
    return {"attention_bias": facts.biased("attn_q"), "mlp_bias": facts.biased("ffn_up")}


def _llama(facts: GGUFFacts) -> Config:
    """Mistral and Mixtral are stored as llama, Mixtral with experts."""
    count, window = facts.own.integer_or("expert_count", 0, minimum=0), facts.own.integer_or(WINDOW, 0, minimum=0)
    found: Config = {"sliding_window": window} if window else {}
    if count:
        found |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": count, **_chosen(facts)}
    elif window:
        found |= {"architectures": ["MistralForCausalLM"]}
    return found if count else found | _biases(facts)


def _granite(facts: GGUFFacts) -> Config:
    """0 and absence are no factor. Of Granite 4 a model without rope has this architecture, too."""
    own, key = facts.own, "rope.scaling.finetuned"
    if own.raw(key) is False:
        raise own.unserved(key, "a Granite without positions (NoPE): give --model another model")
    scales = {name: own.raw(key) or 1.0 for key, name in _GRANITE_SCALES.items()}
    attention = own.raw("attention.scale") or facts.head_dim**-0.5
    return _biases(facts) | scales | {"attention_multiplier": attention}


def _gemma2(facts: GGUFFacts) -> Config:
    return _windows(facts, 2) | _softcaps(facts) | {"query_pre_attn_scalar": _gemma_scalar(facts, 46)}


def _gemma3(facts: GGUFFacts) -> Config:
    """Reads Gemma 3: layers with a window have their own, unscaled rope."""
    local = {"rope_type": "default", "rope_theta": facts.own.number_or("rope.freq_base_swa", 10_000.0)}
    ropes = {"full_attention": facts.rope, "sliding_attention": local}
    scalar = _gemma_scalar(facts, 62)
    return _windows(facts, 6) | _softcaps(facts) | {"query_pre_attn_scalar": scalar, "rope_parameters": ropes}


def _olmo2(facts: GGUFFacts) -> Config:
    """In OLMo 3, layers with a window rotate without scaling."""
    if not facts.own.integer_or(WINDOW, 0, minimum=0):
        return {}
    local = {"rope_type": "default", "rope_theta": facts.own.number_or("rope.freq_base_swa", facts.rope["rope_theta"])}
    ropes = {"full_attention": facts.rope, "sliding_attention": local}
    return _windows(facts, 4) | {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": ropes}


def _mistral3(facts: GGUFFacts) -> Config:
    """Ministral 3, and newer files of Mistral Small 3. Yarn's magnitude is 1: `yarn_log_multiplier` has it cancel."""
    rope = facts.rope | ({"attention_factor": 1.0} if facts.rope["rope_type"] == "yarn" else {})
    beta = facts.own.raw("attention.temperature_scale")
    return {"rope_parameters": rope | ({"llama_4_scaling_beta": beta} if beta else {})}


def _gemma_scalar(facts: GGUFFacts, largest: int) -> float:
    """Returns the scale of queries, for which there is no key: llama.cpp recognises the 27B models, whose scale does
    not follow the head size, by their number of layers."""
    return facts.hidden_size / facts.num_heads if facts.num_layers == largest else facts.head_dim


def _softcaps(facts: GGUFFacts) -> Config:
    return {name: facts.own.number(name) for name in _SOFTCAPS if facts.own.raw(name)}


def _partial(facts: GGUFFacts) -> Config:
    turned = facts.own.integer_or("rope.dimension_count", facts.head_dim)
    return {"partial_rotary_factor": turned / facts.head_dim}


def _phi3(facts: GGUFFacts) -> Config:
    original = facts.own.integer_or("rope.scaling.original_context_length", facts.own.integer("context_length"))
    window = facts.own.integer_or(WINDOW, 0, minimum=0) or None
    return _partial(facts) | {"original_max_position_embeddings": original, "sliding_window": window}


def _glm4(facts: GGUFFacts) -> Config:
    return _partial(facts) | {"attention_bias": facts.biased("attn_q")}


def _cohere2(facts: GGUFFacts) -> Config:
    """The head is always the embedding. Layers without a window do not rotate, and no key says so."""
    scale = facts.own.number("logit_scale")
    return _windows(facts, 4) | {"logit_scale": scale, "tie_word_embeddings": True}


def _starcoder2(facts: GGUFFacts) -> Config:
    """The window is 4096, as in every published model: no key has it, and llama.cpp attends to everything."""
    return {"use_bias": facts.biased("attn_q"), "sliding_window": facts.own.integer_or(WINDOW, 4096)}


def _chosen(facts: GGUFFacts) -> Config:
    return {"num_experts_per_tok": facts.own.integer("expert_used_count")}


def _qwen(facts: GGUFFacts, *, norm_topk_prob: bool, shared: str | None) -> Config:
    """With `norm_topk_prob` weights sum to 1, else they are the softmax's."""
    own = facts.own
    if not (count := own.integer_or("expert_count", 0, minimum=0)):
        return {"num_experts": 0}
    found = _chosen(facts) | {"num_experts": count, "norm_topk_prob": norm_topk_prob}
    found["moe_intermediate_size"] = own.integer("expert_feed_forward_length")
    return found | ({"shared_expert_intermediate_size": own.integer(shared)} if shared else {})


def _gpt_oss(facts: GGUFFacts) -> Config:
    """The published yarn does not round the dimensions between which it blends; no key says so."""
    rope = facts.rope | ({"truncate": False} if facts.rope["rope_type"] == "yarn" else {})
    count, width = facts.own.integer("expert_count"), facts.own.integer("expert_feed_forward_length")
    experts = _chosen(facts) | {"num_local_experts": count, "intermediate_size": width}
    return _windows(facts, 2) | experts | {"rope_parameters": rope}


def _sigmoid_experts(facts: GGUFFacts) -> Config:
    """The fields of DeepSeek's and GLM's experts."""
    own = facts.own
    found = _chosen(facts) | {
        "n_routed_experts": own.integer("expert_count"),
        "moe_intermediate_size": own.integer("expert_feed_forward_length"),
        "n_shared_experts": own.integer_or("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": own.integer_or("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": own.raw("expert_weights_scale") or 1.0,
        "norm_topk_prob": own.flag("expert_weights_norm"),
        "num_nextn_predict_layers": own.integer_or("nextn_predict_layers", 0, minimum=0),
    }
    groups = own.integer_or("expert_group_count", 1), own.integer_or("expert_group_used_count", 1)
    return found | dict(zip(("n_group", "topk_group"), groups, strict=True))


def _gate(facts: GGUFFacts, served: tuple[int, ...]) -> int:
    """Returns the gate's kind. Files before 2025 do not name it; V3's have a correction of scores."""
    key = "expert_gating_func"
    gate = facts.own.integer_or(key, 0, minimum=0)
    gate = gate or (_SIGMOID if any("exp_probs_b" in name for name in facts.tensors) else _SOFTMAX)
    if gate not in served:
        raise facts.own.unserved(key, f"{' or '.join(map(str, served))} (1 softmax, 2 sigmoid) is", gate)
    return gate


def _minimax_m2(facts: GGUFFacts) -> Config:
    _gate(facts, (_SIGMOID,))
    count, width = facts.own.integer("expert_count"), facts.own.integer("expert_feed_forward_length")
    return _partial(facts) | _chosen(facts) | {"num_local_experts": count, "intermediate_size": width}


def _glm4moe(facts: GGUFFacts) -> Config:
    _gate(facts, (_SIGMOID,))
    return _glm4(facts) | _sigmoid_experts(facts) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors}


_UNWRITTEN_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of experts of DeepSeek-V2, V3 and R1, by their experts: files of before October 2025 do not have them."""


def _deepseek2(facts: GGUFFacts) -> Config:
    """Reads DeepSeek: V2's scores are a softmax, those of V3, Kimi K2 and GLM-4.7-Flash sigmoids. Head sizes have keys
    with `_mla` if the file's latent is cut into heads."""
    own, rope_dim = facts.own, facts.own.integer("rope.dimension_count")
    by_sigmoid = _gate(facts, (_SOFTMAX, _SIGMOID)) == _SIGMOID
    found = _sigmoid_experts(facts)
    if "expert_group_count" not in own and found["n_routed_experts"] in _UNWRITTEN_GROUPS:
        found["n_group"], found["topk_group"] = _UNWRITTEN_GROUPS[found["n_routed_experts"]]
    if not by_sigmoid:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    rope = facts.rope
    if rope["rope_type"] == "yarn" and (mscale := own.raw("rope.scaling.yarn_log_multiplier")):
        rope = rope | {"mscale": mscale / 0.1, "mscale_all_dim": mscale / 0.1}  # written a tenth
    query_dim = own.integer_or("attention.key_length_mla", own.integer("attention.key_length"))
    return found | {
        "architectures": ["DeepseekV3ForCausalLM" if by_sigmoid else "DeepseekV2ForCausalLM"],
        "head_dim": rope_dim,
        "q_lora_rank": own.integer_or("attention.q_lora_rank", None),
        "kv_lora_rank": own.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query_dim - rope_dim,
        "v_head_dim": own.integer_or("attention.value_length_mla", own.integer("attention.value_length")),
        "rope_parameters": rope,
    }


_EXPERTS = frozenset({"expert_count"})
_GROUPS = frozenset({"expert_gating_func", "expert_group_count", "expert_weights_scale", "nextn_predict_layers"})
_PARTIAL = frozenset({"rope.dimension_count"})
_WINDOWS = frozenset({WINDOW, PATTERN})

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        served_as="LlamaForCausalLM", models="Llama, Mistral, Mixtral", fields=_llama, permuted=True,
        reads=_EXPERTS | {WINDOW},
    ),
    "qwen2": Architecture(served_as="Qwen2ForCausalLM", models="Qwen2, Qwen2.5"),
    "qwen3": Architecture(served_as="Qwen3ForCausalLM", models="Qwen3"),
    "qwen2moe": Architecture(
        served_as="Qwen2MoeForCausalLM", models="Qwen2-MoE", reads=_EXPERTS,
        fields=partial(_qwen, norm_topk_prob=False, shared="expert_shared_feed_forward_length"),
    ),
    "qwen3moe": Architecture(
        served_as="Qwen3MoeForCausalLM", models="Qwen3-MoE", reads=_EXPERTS,
        fields=partial(_qwen, norm_topk_prob=True, shared=None),
    ),
    "gemma2": Architecture(
        served_as="Gemma2ForCausalLM", models="Gemma 2", fields=_gemma2, reads=_WINDOWS | {*_SOFTCAPS},
    ),
    "gemma3": Architecture(
        served_as="Gemma3ForCausalLM", models="Gemma 3", fields=_gemma3,
        reads=_WINDOWS | {"final_logit_softcapping"},
    ),
    "phi3": Architecture(
        served_as="Phi3ForCausalLM", models="Phi-3, Phi-4", fields=_phi3, reads=_PARTIAL | {WINDOW},
    ),
    "glm4": Architecture(served_as="Glm4ForCausalLM", models="GLM-4", fields=_glm4, reads=_PARTIAL),
    "glm4moe": Architecture(
        served_as="Glm4MoeForCausalLM", models="GLM-4.5, GLM-4.6", fields=_glm4moe,
        reads=_PARTIAL | _EXPERTS | _GROUPS,
    ),
    "minimax-m2": Architecture(
        served_as="MiniMaxM2ForCausalLM", models="MiniMax-M2", fields=_minimax_m2,
        reads=_PARTIAL | _EXPERTS | {"expert_gating_func"},
    ),
    "gpt-oss": Architecture(
        served_as="GptOssForCausalLM", models="gpt-oss", fields=_gpt_oss, reads=_EXPERTS | _WINDOWS,
    ),
    "deepseek2": Architecture(
        served_as="DeepseekV3ForCausalLM", models="DeepSeek-V2, V3, R1, Kimi K2, GLM-4.7-Flash", fields=_deepseek2,
        reads=_PARTIAL | _EXPERTS | _GROUPS | {"attention.value_length", "rope.scaling.yarn_log_multiplier"},
    ),
    "cohere2": Architecture(
        served_as="Cohere2ForCausalLM", models="Command R7B, Command A", fields=_cohere2,
        reads=_WINDOWS | {"logit_scale"}, norm_eps="layer_norm_eps",
    ),
    "starcoder2": Architecture(
        served_as="Starcoder2ForCausalLM", models="StarCoder2", fields=_starcoder2, norm_eps="norm_epsilon",
        reads=frozenset({WINDOW}),
    ),
    "granite": Architecture(
        served_as="GraniteForCausalLM", models="Granite 3", fields=_granite, permuted=True,
        reads=frozenset({"attention.scale", *_GRANITE_SCALES}),
    ),
    "olmo2": Architecture(served_as="Olmo2ForCausalLM", models="OLMo 2 and 3", fields=_olmo2, reads=_WINDOWS),
    "exaone4": Architecture(
        served_as="Exaone4ForCausalLM", models="EXAONE 4", fields=lambda facts: _windows(facts, 4), reads=_WINDOWS,
    ),
    "seed_oss": Architecture(
        served_as="SeedOssForCausalLM", models="Seed-OSS",
        fields=lambda facts: {"attention_bias": facts.biased("attn_q")},
    ),
    "ernie4_5": Architecture(
        served_as="Ernie4_5ForCausalLM", models="ERNIE 4.5", fields=lambda facts: {"use_bias": facts.biased("attn_q")},
    ),
    "mistral3": Architecture(
        served_as="Ministral3ForCausalLM", models="Ministral 3, Mistral Small 3", fields=_mistral3, permuted=True,
        reads=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    ),
    "arcee": Architecture(served_as="ArceeForCausalLM", models="Arcee AFM", fields=_biases, permuted=True),
    "smollm3": Architecture(served_as="SmolLM3ForCausalLM", models="SmolLM3", fields=_biases, permuted=True),
}  # fmt: skip
