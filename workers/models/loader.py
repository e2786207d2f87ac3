"""Reads a checkpoint's weights into a decoder. Every name and shape is checked before the first weight is read."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.hints import counted
from workers.kernels.cpu.native_build import native
from workers.kernels.cpu.regions import return_freed_memory, trim_freed_memory
from workers.kernels.device_kernels import kernels_for
from workers.models.decoder import Decoder
from workers.models.filling import LoadPart, PartLoader, Progress, check_slots, ignore_progress, log_unused
from workers.models.model_config import ModelConfig, read_config
from workers.parallel.group import Solo, TensorParallel
from workers.weights.encoding import LayerContext
from workers.weights.kv_scales import is_kv_scale
from workers.weights.registry import encodings_of, open_source
from workers.weights.safetensors import is_bare
from workers.weights.slots import Slot
from workers.weights.source import FLOATS, WeightSource
from workers.weights.weight_formats import Quantize, RoundedLayers

log = logging.getLogger("baton.worker")

_NOT_LINEAR = ("norm.weight", "bias", "embed_tokens.weight")

_COMPARED_ROWS = 8192

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    quantize: Quantize = "off",
    parallel: TensorParallel | None = None,
    expert_parallel: bool = False,
    on_progress: Progress | None = None,
    packed: bool = False,
) -> Decoder:
    """The checkpoint folder `path` as a decoder on `device`, weights converted to `dtype` ("bfloat16", "float32").

    With `packed` each part is packed as soon as it is read, as `Decoder.pack` does it for all of them afterwards.

    `quantize` rounds the linear weights of a float checkpoint, one tensor at a time.
    With `parallel` only this rank's share is read: of experts columns, or, `expert_parallel`, whole ones.
    `on_progress(done_bytes, total_bytes)` counts that share.
    Raises BadCheckpoint, UnsupportedModel or Misconfigured, each naming the file, tensor or setting and the fix.
    """
    made_in = dtype_named(dtype)
    if device == "cpu":
        return_freed_memory()
    folder = Path(path)
    config = read_config(folder, quantize)
    with open_source(folder) as source:
        context = LayerContext(
            device=device,
            dtype=made_in,
            parallel=parallel or Solo(),
            kernels=kernels_for(device),
            encodings=encodings_of(config.weight_format, source),
            expert_parallel=expert_parallel,
        )
        config = with_stored_head(folder, config, source)
        if quantize != "off":
            config = replace(config, tied_embeddings=False)
        slots = _checked_slots(folder, config, context, source)
        decoder = Decoder(config, context, stored_as=_stored_as(config, slots, source))
        log.info("%s: %s", folder, decoder.stored_as)
        parts = list(decoder.load_parts())
        if not packed:
            parts = [LoadPart(slots=part.slots) for part in parts]
        for number_type in _DTYPES.values():
            native(number_type)  # compiled before several threads need it
        num_threads = torch.get_num_threads() if device == "cpu" else 1
        PartLoader(folder, source).load(parts, on_progress or ignore_progress, num_threads=num_threads)
    if device == "cpu":
        trim_freed_memory()
    return decoder


def dtype_named(dtype: str) -> torch.dtype:
    """Raises Misconfigured."""
    if dtype not in _DTYPES:
        raise Misconfigured(f"dtype {dtype!r} is not served: choose one of {', '.join(_DTYPES)}", param="dtype")
    return _DTYPES[dtype]


def with_stored_head(folder: Path, config: ModelConfig, source: WeightSource) -> ModelConfig:
    """The config, tied as the stored tensors are, as transformers does it. EXL2 quantises the head of a tied model too,
    and keeps the embedding in floating point."""
    heads = [name for name in source.names() if name.startswith("lm_head.") and name != "lm_head.bias"]
    if not heads and not config.tied_embeddings and is_bare(folder):
        log.warning("%s has no lm_head: embeddings are served, and what it writes has no meaning", folder)
        return replace(config, tied_embeddings=True)
    if not heads or not config.tied_embeddings:
        return config
    if heads == ["lm_head.weight"]:
        if same_tensors(source, heads[0], "model.embed_tokens.weight"):
            return config
        log.warning("%s: tie_word_embeddings is true, but lm_head.weight differs and is used", folder)
    return replace(config, tied_embeddings=False)


def same_tensors(source: WeightSource, name: str, other: str) -> bool:
    shape = source.describe(name).shape
    if source.describe(other).shape != shape:
        return False
    parts = (slice(first, first + _COMPARED_ROWS) for first in range(0, shape[0], _COMPARED_ROWS))
    return all(torch.equal(source.read(name, 0, part), source.read(other, 0, part)) for part in parts)


def _stored_as(config: ModelConfig, slots: list[Slot], source: WeightSource) -> str:
    """The encoding of the linear layers, with the bits of their scales: "gptq-int4-g128, 4.16 bits a weight"."""
    linear = {slot.name for slot in slots if not slot.name.endswith(_NOT_LINEAR)}
    stored = [source.describe(name) for name in sorted(linear)]
    label = (
        config.weight_format.label if config.weight_format else "-".join(sorted({tensor.dtype for tensor in stored}))
    )
    num_bytes = sum(tensor.num_bytes for tensor in stored)
    rounding = config.weight_format.settings if config.weight_format else None
    if isinstance(rounding, RoundedLayers):
        rounded = {
            (slot.name.removesuffix(".weight"), slot.shape) for slot in slots if slot.consume and len(slot.shape) == 2
        }
        num_bytes = sum(rounding.num_bytes(name, *shape) for name, shape in rounded)
    return f"{label}, {8 * num_bytes / config.num_linear_weights:.4g} bits a weight"


def _checked_slots(folder: Path, config: ModelConfig, context: LayerContext, source: WeightSource) -> list[Slot]:
    """Lists the slots on a device without memory: a config.json that the files contradict must not allocate."""
    names = frozenset(source.names())
    if config.num_layers > len(names):
        raise BadCheckpoint(
            f"{folder} has {counted(len(names), 'tensor')}, fewer than the {config.num_layers} layers in config.json"
        )
    whole = Solo() if context.expert_parallel else context.parallel  # otherwise other ranks' experts would seem unused
    slots = list(Decoder(config, replace(context, device="meta", parallel=whole)).slots())
    check_slots(folder, slots, source)
    ignored = {"lm_head.weight"} if config.tied_embeddings else set()
    ignored |= _of_mtp_layers(folder, config, names)
    unexpected = sorted(
        name for name in names - {slot.name for slot in slots} - ignored if not name.endswith("rotary_emb.inv_freq")
    )
    linear = {slot.name.rpartition(".")[0] for slot in slots if config.weight_format}
    unexpected = [name for name in unexpected if not _is_empty_bias(folder, name, linear, source)]
    log_unused(folder, [name for name in unexpected if not is_kv_scale(name)])
    return slots


def _of_mtp_layers(folder: Path, config: ModelConfig, names: frozenset[str]) -> set[str]:
    """The tensors of layers for multi-token prediction, which follow the decoder's layers."""
    mtp_names = {name for name in names if name.startswith(config.mtp_prefixes)}
    if mtp_names:
        layers = ", ".join(prefix.split(".")[2] for prefix in config.mtp_prefixes)
        log.info("%s: layers for multi-token prediction (%s) are not loaded", folder, layers)
    return mtp_names


def _is_empty_bias(folder: Path, name: str, layers: set[str], source: WeightSource) -> bool:
    """AutoGPTQ stores biases of zeros for layers that have none. Raises UnsupportedModel for others."""
    layer, _, suffix = name.rpartition(".")
    if suffix != "bias" or layer not in layers:
        return False
    stored = source.describe(name)
    if stored.dtype in FLOATS and bool((source.read(name, 0, slice(None)) != 0).any()):
        raise UnsupportedModel(
            f"{folder}: tensor {name!r} is a bias, and config.json makes this layer one without: set "
            "attention_bias or mlp_bias there"
        )
    return True
