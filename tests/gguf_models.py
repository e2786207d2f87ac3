"""Converts a Hugging Face folder to a GGUF file for tests, as llama.cpp's convert_hf_to_gguf.py and llama-quantize."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.gguf_blocks import SIZES, encoded, random_blocks
from tests.gguf_families import ARCHITECTURES, NAMES, keys_of, stored_parts
from tests.gguf_writer import Stored, write_gguf, write_shards

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "ministral3")
_SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale", "residual_multiplier": "residual_scale",
}  # fmt: skip


_STACKED = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def convert(
    folder: Path,
    path: Path,
    kind: str,
    *,
    others: Mapping[str, str] = {},
    shards: int = 1,
    metadata: Mapping[str, Any] = {},
    made_up: bool = False,
    whole_latents: bool = False,
    fused_experts: bool = False,
) -> Path:
    """Matrices get the type `kind`, or that of the first pattern of `others` that their name has. `made_up` weights are
    random valid blocks. What a type's blocks do not divide is stored as Q8_0 or F16. `whole_latents`: kv_b_proj is one
    tensor, as before April 2025. `fused_experts`: gate and up of an expert are one, as with --fuse-gate-up-exps."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Stored] = {}
    stacks: dict[str, dict[int, Stored]] = {}
    written = (
        part
        for name, weight in load_file(folder / "model.safetensors").items()
        for part in stored_parts(name, weight.float(), config, whole_latents=whole_latents)
    )
    for name, weight in written:
        stored = name if name.startswith("blk.") else _name_in_file(name, config["model_type"])
        wanted = next((other for pattern, other in others.items() if re.search(pattern, stored)), kind)
        if expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", name):
            stack = f"blk.{name.split('.')[2]}.{_STACKED[expert[2]]}.weight"
            wanted = next((other for pattern, other in others.items() if re.search(pattern, stack)), kind)
            stacks.setdefault(stack, {})[int(expert[1])] = _stored(stack, weight, wanted, made_up=made_up)
            continue
        if config["model_type"] in _PERMUTED and re.search("self_attn.[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = weight.unflatten(0, (heads, 2, -1)).swapaxes(1, 2).flatten(0, 2)
        tensors[stored] = _stored(stored, weight, wanted, made_up=made_up)
    for stored, experts in stacks.items():
        parts = [experts[number] for number in range(len(experts))]
        data = b"".join(part.data for part in parts)
        tensors[stored] = Stored((len(parts), *parts[0].shape), parts[0].kind, data)
    if fused_experts:
        tensors |= dict(_fused(tensors))
    tensors |= _rope_tensors(config)
    values = {**_metadata(config), **_tokenizer(folder, config), **metadata}
    if shards > 1:
        return write_shards(path.with_suffix(""), values, tensors, shards)[0]
    return write_gguf(path, values, tensors)


def tokenizer_metadata(
    state: Mapping[str, Any], *, pre: str, vocab_size: int, scores: Sequence[float] | None = None
) -> dict[str, Any]:
    """The metadata of a tokenizer.json. With `scores` it is SentencePiece, whose merges are not stored."""
    texts, types = [f"[PAD{index}]" for index in range(vocab_size)], [5] * vocab_size
    for text, index in state["model"]["vocab"].items():
        is_byte = scores is not None and re.fullmatch("<0x[0-9A-F]{2}>", text)
        texts[index], types[index] = text, 6 if is_byte else 1
    for token in state["added_tokens"]:
        texts[token["id"]], types[token["id"]] = token["content"], 3 if token["special"] else 4
        if scores is not None and token["content"] == "<unk>":
            types[token["id"]] = 2
    metadata: dict[str, Any] = {"tokens": texts, "token_type": ("int32", types)}
    if scores is None:
        metadata |= {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in state["model"]["merges"]]}
    else:
        metadata |= {"model": "llama", "scores": ("float32", [*scores, *[-1000.0] * (vocab_size - len(scores))])}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _fused(tensors: dict[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Removes the stacks of gate and up from `tensors` and joins them, gate's rows first."""
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        gate, up = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        count, rows, inputs = gate.shape
        size = len(gate.data) // count
        parts = (tensor.data[i * size : (i + 1) * size] for i in range(count) for tensor in (gate, up))
        yield name.replace("gate", "gate_up"), Stored((count, 2 * rows, inputs), gate.kind, b"".join(parts))


def _name_in_file(name: str, family: str) -> str:
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name)
    assert match is not None
    own = (_NAMES | NAMES.get(family, {})).get(match[2], "")
    return f"{f'blk.{match[1]}.' if match[1] else ''}{own}.{match[3]}"


def _stored(name: str, weight: torch.Tensor, kind: str, *, made_up: bool) -> Stored:
    if weight.dim() == 3:  # one matrix on another
        flat = _stored(name, weight.flatten(0, 1), kind, made_up=made_up)
        return Stored(tuple(weight.shape), flat.kind, flat.data)
    num_values, values = weight.shape[-1], weight.numpy()
    if "ffn_gate_inp" in name:  # routers are never quantised, and the shared expert's gate is a vector
        weight, values, kind = weight.squeeze(0), weight.squeeze(0).numpy(), "F32"
    if weight.dim() == 1 or name.endswith("bias"):
        kind = "F32"
    elif kind in SIZES and num_values % SIZES[kind][0]:
        kind = "F16" if num_values % 32 else "Q8_0"
    if made_up and kind in SIZES:
        return Stored(tuple(weight.shape), kind, random_blocks(kind, weight.shape[0], num_values, len(name)).tobytes())
    return Stored(tuple(weight.shape), kind, encoded(kind, values).tobytes())


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
    }
    if config["model_type"] == "granite":
        own |= {key: float(config[field]) for field, key in _SCALES.items()}
    if count := config.get("num_local_experts", config.get("num_experts")):
        own |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        own["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    if (kind := rope.get("rope_type", "default")) in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    own |= keys_of(config)
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in own.items() if value is not None}}


def _rope_tensors(config: Mapping[str, Any]) -> dict[str, Stored]:
    """Llama 3's scaling is stored as a factor for each pair, Phi's as it is."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": Stored(
                (len(factors),), "F32", torch.tensor(factors, dtype=torch.float32).numpy().tobytes()
            )
            for length in ("long", "short")
            for factors in [rope[f"{length}_factor"]]
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": Stored((len(factors),), "F32", torch.tensor(factors).numpy().tobytes())}


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if not (folder / "tokenizer.json").exists():
        return {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}
    state = json.loads((folder / "tokenizer.json").read_text())
    beside = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {token["content"]: token["id"] for token in state["added_tokens"]}
    named = {role: ids[beside[f"{role}_token"]] for role in ("bos", "eos") if f"{role}_token" in beside}
    return {
        **tokenizer_metadata(state, pre="gpt-2", vocab_size=config["vocab_size"]),
        **{f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in named.items()},
        "tokenizer.ggml.add_bos_token": state["post_processor"] is not None,
        "tokenizer.chat_template": beside["chat_template"],
    }
