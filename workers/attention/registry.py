"""Which attention serves which device. A backend's module is imported when it is chosen, not before."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from protos.errors import Misconfigured
from workers.attention.base import AttentionBackend
from workers.kv.storage import KVStorage

BACKENDS: dict[str, str] = {
    "cpu": "workers.attention.cpu:cpu_attention",
    "cuda": "workers.attention.paged:PagedAttention",
    "torch": "workers.attention.cpu:TorchAttention",
    "reference": "workers.attention.reference:ReferenceAttention",
}


def attention_for(storage: KVStorage, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, by default the one of the storage's device. Misconfigured for an unknown name."""
    name = name or storage.device.type
    if name not in BACKENDS:
        raise Misconfigured(f"no attention is called {name!r}: choose one of {', '.join(BACKENDS)}", param="attention")
    module, _, member = BACKENDS[name].partition(":")
    make = cast(Callable[[KVStorage], AttentionBackend], getattr(import_module(module), member))
    return make(storage)
