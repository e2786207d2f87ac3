"""Which source opens a checkpoint, and which encodings its config names. Naming one loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from protos.errors import UnsupportedModel
from protos.model_files.base import ModelFiles
from protos.model_files.fields import Fields
from protos.model_files.gguf.files import GGUFFiles
from protos.model_files.opening import open_model
from workers.checkpoint.formats.base import WeightFormat
from workers.checkpoint.gguf.source import open_gguf
from workers.checkpoint.safetensors import open_safetensors
from workers.checkpoint.source import StoredTensor, WeightSource

if TYPE_CHECKING:
    from workers.checkpoint.encoding import WeightEncodings

_FLOATS = "workers.checkpoint.encodings.floats:encodings"

_FORMATS: Mapping[str, str] = {
    "awq": "workers.checkpoint.formats.awq:read_awq",
    "bitsandbytes": "workers.checkpoint.formats.bitsandbytes:read_bitsandbytes",
    "compressed-tensors": "workers.checkpoint.formats.compressed_tensors:read_compressed",
    "exl2": "workers.checkpoint.formats.exl2:read_exl2",
    "fp8": "workers.checkpoint.formats.fp8:read_fp8",
    "gguf": "workers.checkpoint.formats.gguf:read_gguf",
    "gptq": "workers.checkpoint.formats.gptq:read_gptq",
    "mxfp4": "workers.checkpoint.formats.mxfp4:read_mxfp4",
}
"""By `quant_method`: a function from the quantization_config's `Fields` to a `WeightFormat`."""

_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of older checkpoints without a quantization_config in config.json, and whose they are if they do not say."""


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
    """How the weights are quantised, None where they are in floating point.

    Raises UnsupportedModel where it is not served, BadCheckpoint where a field is wrong.
    """
    given = config.inner("quantization_config")
    method: Any = given.raw("quant_method") or given.raw("method")
    if config.raw("quantization_config") is None:
        beside = [file for file in _BESIDE if files.has(file)]
        if not beside:
            return None
        given = Fields.of_file(files, beside[0])
        method = given.raw("quant_method") or _BESIDE[beside[0]]
    if not isinstance(method, str) or method not in _FORMATS:
        raise UnsupportedModel(
            f"{given.where}: the weights are quantised by quant_method {method!r}, which is not served: "
            f"served are {', '.join(_FORMATS)}, and weights in bfloat16, float16 or float32. Give --model the "
            "checkpoint that it was made from (its model card names the base model), or write one with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(other_folder)",
            param="quantization_config",
        )
    found: WeightFormat = resolve_name(_FORMATS[method])(given)
    return found


def encodings_of(weight_format: WeightFormat | None, source: WeightSource) -> WeightEncodings:
    """Of the checkpoint's linear weights: which tensors are stored decides where the config leaves it open."""
    found: WeightEncodings = resolve_name(weight_format.encodings if weight_format else _FLOATS)(weight_format, source)
    return found
