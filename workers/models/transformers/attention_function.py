"""The attention function that transformers' models call in place of their own, through `AttentionInterface`.

    model ── query, key, value of the packed rows ──▶ attend ──▶ module.baton_step: traces the call, or pages it

Rows lie one behind the other in a batch of 1, so no mask is made: the backend knows the rows. Legend: T tokens, N query
heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

SERVED, TRACED = "baton", "baton_trace"
"""Names of the implementations. Models make a mask for the traced one only."""


class AttentionStep(Protocol):
    def __call__(
        self,
        module: torch.nn.Module,
        q_1NTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTD: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Returns [1, T, N, D of the values]."""
        ...


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    step: AttentionStep = module.baton_step
    return step(module, query, key, value, attention_mask, scale, options), None


def traced_mask(**arguments: Any) -> torch.Tensor | None:
    """Wraps a function that makes a mask; the mask function decides which keys a query sees."""
    step: Callable[..., torch.Tensor | None] = arguments["config"].baton_masks
    return step(**arguments)


def register() -> None:
    """Adds both names to transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVED, attend)
    AttentionInterface.register(TRACED, attend)
    AttentionMaskInterface.register(TRACED, traced_mask)
