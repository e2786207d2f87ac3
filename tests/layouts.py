"""Dense KV layouts that differ in one of their sizes."""

from __future__ import annotations

from typing import Any

from protos.values import KVLayout


def changed(layout: KVLayout, **sizes: Any) -> KVLayout:
    """`layout` with other arguments of `KVLayout.dense`."""
    part = layout.parts[0]
    fields: dict[str, Any] = {
        "num_layers": layout.num_layers,
        "num_kv_heads": part.heads,
        "head_dim": part.width,
        "dtype": part.dtype,
    }
    whole = {"block_size": layout.block_size, "tp": layout.tp, "model": layout.model, "device": layout.device}
    return KVLayout.dense(**(fields | whole | sizes))
