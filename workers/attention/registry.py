"""The attention backend of each device. A backend's module is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from protos.errors import Misconfigured
from workers.attention.backend import AttentionBackend
from workers.attention.grouped_attention import GroupedAttention
from workers.kv.kv_storage import KVStorage

BACKENDS: dict[str, str] = {
    "cpu": "workers.attention.cpu:cpu_attention",
    "cuda": "workers.attention.paged:PagedAttention",
    "torch": "workers.attention.torch_attention:TorchAttention",
}


def attention_for(storage: KVStorage, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, by default that of the storage's device. Raises Misconfigured for an unknown name."""
    name = name or storage.device.type
    if name not in BACKENDS:
        raise Misconfigured(f"attention = {name!r}: choose one of {', '.join(BACKENDS)}", param="attention")
    make: Callable[[KVStorage, int], AttentionBackend] = resolve_name(BACKENDS[name])
    backends = [make(storage, group) for group in range(len(storage.layout.groups))]
    return backends[0] if len(backends) == 1 else GroupedAttention(storage.layout, backends)
