"""Which source opens a checkpoint, and which encodings its config.json names. Naming one loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from protos.errors import UnsupportedModel
from workers.checkpoint.fields import Fields
from workers.checkpoint.safetensors import check_safetensors, open_safetensors
from workers.checkpoint.source import WeightSource

if TYPE_CHECKING:
    from workers.checkpoint.encoding import WeightEncodings

_ENCODINGS: Mapping[str | None, str] = {None: "workers.checkpoint.encodings.floats:encodings"}
"""By `quant_method`, None where config.json has none: a function from the quantization_config to `WeightEncodings`."""


def check_weights(folder: Path) -> None:
    """Reads every file's header. Raises BadCheckpoint for one that is missing, truncated or damaged."""
    check_safetensors(folder)


def open_source(folder: Path) -> AbstractContextManager[WeightSource]:
    """Raises BadCheckpoint where there are no weights, or they cannot be read."""
    return open_safetensors(folder)


def require_known_encoding(config: Fields) -> None:
    """Raises UnsupportedModel when the weights are quantised in a way that is not served."""
    if config.raw("quantization_config") is None:
        return
    method = config.inner("quantization_config").raw("quant_method")
    if method is None or method not in _ENCODINGS:
        raise UnsupportedModel(
            f"{config.where}: its weights are quantised (quantization_config{f', {method}' if method else ''}), which "
            "is not supported: weights in bfloat16, float16 or float32 are served. Give --model the checkpoint that it "
            "was made from (its model card names the base model), or write one with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(other_folder)",
            param="quantization_config",
        )


def encodings_of(quantization: Mapping[str, Any]) -> WeightEncodings:
    """Of a checkpoint with this quantization_config (empty: none), which `require_known_encoding` has let through."""
    found: WeightEncodings = resolve_name(_ENCODINGS[quantization.get("quant_method")])(quantization)
    return found
