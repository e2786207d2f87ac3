"""Which workers can exchange KV at all. Pure integers: no tensor is looked at."""

from __future__ import annotations

from protos.errors import IncompatibleWorkers
from protos.values import KVLayout

_MUST_AGREE = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "tp")


def require_same_layout(source: str, source_layout: KVLayout, destination: str, layout: KVLayout) -> None:
    """Raises IncompatibleWorkers, naming both workers and every field that keeps them apart."""
    differing = [
        f"{name} is {ours!r} there and {theirs!r} here"
        for name in _MUST_AGREE
        if (ours := getattr(source_layout, name)) != (theirs := getattr(layout, name))
    ]
    if differing:
        raise IncompatibleWorkers(
            f"KV cannot go from worker {source} to worker {destination}: {'; '.join(differing)}. "
            f"Start both pools with the same model and the same settings",
            param="source_layout",
        )
