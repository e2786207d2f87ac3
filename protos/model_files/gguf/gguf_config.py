"""config.json and generation_config.json, made from a GGUF file's metadata and its table of tensors."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.gguf.architectures import ARCHITECTURES, WINDOW, Architecture, GGUFFacts
from protos.model_files.gguf.gguf_file import GGUFFile, GGUFTensor
from protos.model_files.gguf.metadata import GGUFArray

# Keys below the architecture's name that would change what the layers compute, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))


def config_of(gguf: GGUFFile) -> dict[str, Any]:
    """The model's configuration. Raises UnsupportedModel for a model that Baton does not serve, and BadCheckpoint for a
    missing key or one of the wrong type."""
    metadata = Fields(gguf.metadata, str(gguf.path))
    name = metadata.text_or("general.architecture", "")
    _refuse_other_files(metadata, name)
    architecture = ARCHITECTURES[name]
    own = _of_architecture(gguf, name)
    for key, harmless in _NEUTRAL.items():
        if key in own and key not in architecture.reads and own.raw(key) not in harmless:
            raise UnsupportedModel(f"{own.where}.{key} is {own.raw(key)!r}, which is not supported", param=key)
    vocab_size, hidden_size = _matrix(gguf, EMBEDDING).shape
    num_heads = own.integer("attention.head_count")
    head_dim = own.integer_or("attention.key_length", hidden_size // num_heads)
    turned = own.integer_or("rope.dimension_count", head_dim)
    _check_heads(own, architecture, head_dim, turned)
    if WINDOW not in architecture.reads and (window := own.integer_or(WINDOW, 0, minimum=0)):
        raise UnsupportedModel(f"{own.where}.{WINDOW} is {window}, and no key says of which layers: give another file")
    num_layers = own.integer("block_count") - own.integer_or("nextn_predict_layers", 0, minimum=0)
    rope, eps = _rope(gguf, own, turned), architecture.norm_eps
    config = {
        "architectures": [architecture.served_as],
        "vocab_size": vocab_size,
        "hidden_size": own.integer("embedding_length"),
        "intermediate_size": own.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.integer_or("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.integer("context_length"),
        eps: own.number(f"attention.layer_norm_{'rms_' if eps == 'rms_norm_eps' else ''}epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": HEAD not in gguf.tensors,
        "dtype": "float32" if (kind := _main_type(gguf)) == "F32" else "bfloat16",
        "quantization_config": {"quant_method": "gguf", "type": kind},
        "eos_token_id": metadata.raw("tokenizer.ggml.eos_token_id"),
    }
    facts = GGUFFacts(
        own=own,
        tensors=frozenset(gguf.tensors),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        rope=rope,
    )
    return config | architecture.fields(facts)


def generation_of(gguf: GGUFFile, eos_ids: list[int]) -> dict[str, Any]:
    metadata = Fields(gguf.metadata, str(gguf.path))
    names = {
        "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }  # fmt: skip
    fields = {name: metadata.raw(f"general.sampling.{key}") for name, key in names.items()}
    return {"eos_token_id": eos_ids} | {
        name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _refuse_other_files(metadata: Fields, name: str) -> None:
    kind = metadata.text_or("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{metadata.where}: general.type is {kind!r}: give --model a GGUF file of a model")
    if name not in ARCHITECTURES:
        models = ", ".join(architecture.models for architecture in ARCHITECTURES.values())
        raise UnsupportedModel(
            f"{metadata.where}: general.architecture is {name!r}, which is not supported: known are "
            f"{', '.join(ARCHITECTURES)} ({models}; for text)",
            param="general.architecture",
        )


def _of_architecture(gguf: GGUFFile, name: str) -> Fields:
    prefix = f"{name}."
    fields: dict[str, Any] = {}
    for key in gguf.metadata:
        if not key.startswith(prefix):
            continue
        value = gguf.metadata[key]
        if isinstance(value, GGUFArray) and value.code and len(different := set(value.values())) == 1:
            value = different.pop()
        fields[key.removeprefix(prefix)] = value
    return Fields(fields, f"{gguf.path}: {name}")


def _matrix(gguf: GGUFFile, name: str) -> GGUFTensor:
    tensor = gguf.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        what = "is missing" if tensor is None else f"is {tensor.shape}, and must have two dimensions"
        raise BadCheckpoint(f"{gguf.path}: tensor {name!r} {what}: download the file again")
    return tensor


def _check_heads(own: Fields, architecture: Architecture, head_dim: int, turned: int) -> None:
    values = own.integer_or("attention.value_length", head_dim)
    if values != head_dim and "attention.value_length" not in architecture.reads:
        raise UnsupportedModel(
            f"{own.where}.attention.value_length is {values}: it must be {head_dim}, as that of keys"
        )
    if turned != head_dim and "rope.dimension_count" not in architecture.reads:
        raise UnsupportedModel(f"{own.where}.rope.dimension_count is {turned}: it must be {head_dim}, all of a head")


def _rope(gguf: GGUFFile, own: Fields, turned: int) -> dict[str, Any]:
    kind = own.text_or("rope.scaling.type", "none")
    factor = own.number_or("rope.scaling.factor", own.number_or("rope.scale_linear", 1.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.number_or("rope.freq_base", 10_000.0)}
    original = own.integer_or("rope.scaling.original_context_length", own.integer("context_length"))
    if _FACTORS in gguf.tensors:
        return rope | {"rope_type": "factors", "factors": _numbers(gguf, _FACTORS, turned // 2)}
    if _LONG_FACTORS in gguf.tensors:
        return rope | {
            "rope_type": "longrope",
            "long_factor": _numbers(gguf, _LONG_FACTORS, turned // 2),
            "short_factor": _numbers(gguf, _SHORT_FACTORS, turned // 2),
            "original_max_position_embeddings": original,
            "attention_factor": own.number_or("rope.scaling.attn_factor", 1.0),
        }
    if kind == "none" or factor == 1.0:
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if "rope.scaling.attn_factor" in own:  # llama.cpp multiplies it by the factor's result
            yarn["attention_factor"] = own.number("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
        betas = (name for name in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{name}" in own)
        return rope | yarn | {name: own.number(f"rope.scaling.yarn_{name}") for name in betas}
    raise UnsupportedModel(f"{own.where}.rope.scaling.type is {kind!r}: none, linear and yarn are supported")


def _numbers(gguf: GGUFFile, name: str, count: int) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.format.name != "F32" or tensor.shape != (count,):
        raise BadCheckpoint(f"{gguf.path}: tensor {name!r} must hold {count} numbers of type F32: download it again")
    return list(struct.unpack(f"<{count}f", gguf.bytes_of(tensor)))


def _main_type(gguf: GGUFFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        sizes[tensor.format.name] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0]
