"""Which source opens a checkpoint, and which encodings its config names. Naming one loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from protos.errors import UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.files_seam import ModelFiles
from protos.model_files.gguf.gguf_files import GGUFFiles
from protos.model_files.opening import open_model
from workers.weights.compressed_schemes import read_compressed
from workers.weights.gguf_source import open_gguf
from workers.weights.safetensors import open_safetensors
from workers.weights.source import StoredTensor, WeightSource
from workers.weights.weight_formats import (
    WeightFormat,
    read_awq,
    read_bitsandbytes,
    read_exl2,
    read_fp8,
    read_gguf,
    read_gptq,
    read_mxfp4,
)

if TYPE_CHECKING:
    from workers.weights.encoding import WeightEncodings

_METHODS: Mapping[str, Callable[[Fields], WeightFormat]] = {
    "awq": read_awq, "bitsandbytes": read_bitsandbytes, "compressed-tensors": read_compressed, "exl2": read_exl2,
    "fp8": read_fp8, "gguf": read_gguf, "gptq": read_gptq, "mxfp4": read_mxfp4,
}  # fmt: skip
"""By `quant_method`."""
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of older checkpoints without a quantization_config in config.json, and their method if they do not name one."""


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """By name. Reads every file's header, without torch. Raises BadCheckpoint for one that is missing or damaged."""
    with open_source(path, framework="numpy") as source:
        return {name: source.describe(name) for name in source.names()}


def open_source(path: Path, *, framework: str = "pt") -> AbstractContextManager[WeightSource]:
    """Raises BadCheckpoint where there are no weights, or they cannot be read. With framework "numpy" without torch:
    then tensors can be described, and not read."""
    files = open_model(path)
    if isinstance(files, GGUFFiles):
        return open_gguf(files.gguf)
    return open_safetensors(files.path, framework=framework)


def read_format(config: Fields, files: ModelFiles) -> WeightFormat | None:
    """How the weights are quantised; None for floating point. Raises UnsupportedModel or BadCheckpoint."""
    section = config.inner("quantization_config")
    method: Any = section.raw("quant_method") or section.raw("method")
    if config.raw("quantization_config") is None:
        beside = [file for file in _BESIDE if files.has(file)]
        if not beside:
            return None
        section = Fields.of_file(files, beside[0])
        method = section.raw("quant_method") or _BESIDE[beside[0]]
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"{section.where}: quant_method {method!r} is not served: {', '.join(_METHODS)} and floats are. Give "
            "--model the checkpoint that it was made from, or write one with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(other_folder)",
            param="quantization_config",
        )
    return _METHODS[method](section)


def encodings_of(weight_format: WeightFormat | None, source: WeightSource) -> WeightEncodings:
    """The encodings of the checkpoint's linear weights. `source` decides what the config leaves open."""
    if weight_format is None:
        from workers.weights.formats.float_matrix import only_floats

        return only_floats
    make = resolve_name(f"workers.weights.formats.{weight_format.encodings}")
    encodings: WeightEncodings = make(weight_format.settings, source)
    return encodings
