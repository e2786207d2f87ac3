"""The scales that a checkpoint has for keys and values in fp8: a number x is cached as x / scale.

Written by llm-compressor (`self_attn.k_scale`, with a `kv_cache_scheme` in config.json), AutoFP8 (`self_attn.kv_scale`,
`k_proj.output_scale`), ModelOpt (`k_proj.k_scale`) and vLLM (`attn.k_scale`). One number for a layer, or one for each
key/value head. Legend: K key/value heads of this rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from workers.weights.registry import open_source

if TYPE_CHECKING:
    import torch

    from workers.weights.source import WeightSource

_NAMES: Mapping[str, tuple[str, ...]] = {
    "k_scale": ("key",),
    "v_scale": ("value",),
    "kv_scale": ("key", "value"),
    "k_proj.output_scale": ("key",),
    "v_proj.output_scale": ("value",),
}
_PATTERN = re.compile(rf"\blayers\.(\d+)\.(?:.+\.)?({'|'.join(map(re.escape, _NAMES))})$")


_LEAST = 2.0**-100
"""Scores times it are no zeros: that of a position which a query does not see is -inf, and times 0 it is NaN."""


def is_kv_scale(name: str) -> bool:
    return _PATTERN.search(name) is not None


def read_kv_scales(
    path: str | Path, *, num_layers: int, num_kv_heads: int, heads: range
) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer: of keys and of values, each [K] in float32, of the `heads` out of `num_kv_heads`. Layers without scales
    are left out.

    Raises UnsupportedModel for scales of another type than fp8, BadCheckpoint for a scale that cannot be one."""
    _check_scheme(path)
    by_layer: dict[int, dict[str, torch.Tensor]] = {}
    with open_source(Path(path)) as source:
        for name in sorted(source.names()):
            if (matched := _PATTERN.search(name)) and (layer := int(matched[1])) < num_layers:
                scale_K = _read(path, source, name, num_kv_heads)[heads.start : heads.stop]
                by_layer.setdefault(layer, {}).update(dict.fromkeys(_NAMES[matched[2]], scale_K))
    for layer, parts in by_layer.items():
        if len(parts) < 2:
            raise BadCheckpoint(
                f"{path}: layer {layer} has a scale for its {next(iter(parts))}s only: give kv_dtype int8"
            )
    return {layer: (parts["key"], parts["value"]) for layer, parts in by_layer.items()}


def _check_scheme(path: str | Path) -> None:
    """Checks compressed-tensors' scheme; other formats have one type."""
    files = open_model(path)
    scheme = Fields.of_file(files, "config.json").inner("quantization_config").inner("kv_cache_scheme")
    kind = scheme.text_or("type", "float"), scheme.integer_or("num_bits", 8)
    if kind != ("float", 8):
        raise UnsupportedModel(
            f"{scheme.where}: its scales are for {kind[0]!r} in {kind[1]} bits, kv_dtype is fp8: give int8 or auto",
            param="kv_dtype",
        )


def _read(path: str | Path, source: WeightSource, name: str, num_kv_heads: int) -> torch.Tensor:
    import torch

    scale = source.read(name, 0, slice(None)).to(torch.float32).flatten()
    if scale.numel() not in (1, num_kv_heads):
        raise BadCheckpoint(f"{path}: tensor {name!r} has {scale.numel()} numbers: it must have 1 or {num_kv_heads}")
    if not bool((scale.isfinite() & (scale >= _LEAST)).all()):
        raise BadCheckpoint(f"{path}: tensor {name!r} has {scale.tolist()}: scales must be finite and at least 2**-100")
    return scale.expand(num_kv_heads).contiguous()
