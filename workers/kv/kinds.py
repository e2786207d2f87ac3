"""KV caches in 8 bits: their layout, and which models can have one. Pure.

int8   symmetric, a scale for each token and head, which lies in the token's block
fp8    e4m3, a scale for each layer or head, which the checkpoint has

Both round a token when it is written, from this token's keys and values alone: a block that is recomputed, transferred
or loaded from the host has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from protos.errors import UnsupportedModel
from protos.values import SCALE, KVLayout, KVPart
from workers.worker_config import KVDtype

INT8, FP8 = "int8", "float8_e4m3fn"
_TYPES: Mapping[str, str] = {"int8": INT8, "fp8": FP8}
_ROUNDED = ("key", "value")


def with_kv_dtype(layout: KVLayout, kv_dtype: KVDtype) -> KVLayout:
    """The layout with keys and values of another type; the same for "auto". Raises UnsupportedModel for a cache of
    other parts."""
    if kv_dtype == "auto":
        return layout
    if any(part.name not in _ROUNDED for part in layout.parts):
        refuse_latents(kv_dtype)
    made = {group.parts: _rounded(group.parts, _TYPES[kv_dtype]) for group in layout.groups}
    return replace(layout, groups=tuple([replace(group, parts=made[group.parts]) for group in layout.groups]))


def refuse_latents(kv_dtype: KVDtype) -> None:
    """Raises UnsupportedModel for latents in 8 bits."""
    if kv_dtype != "auto":
        raise UnsupportedModel(f"kv_dtype is {kv_dtype}: latents are not rounded: leave it out", param="kv_dtype")


def _rounded(parts: tuple[KVPart, ...], dtype: str) -> tuple[KVPart, ...]:
    """Values first, then their scales: parts of one shape lie side by side."""
    values = tuple([replace(part, dtype=dtype) for part in parts])
    if dtype != INT8:
        return values
    scales = [replace(part, name=f"{part.name}{SCALE}", width=1, dtype="float32") for part in parts]
    return (*values, *scales)
