"""Ropes of transformers that have other frequencies for long sequences (longrope, https://arxiv.org/abs/2402.13753).

transformers chooses by the largest position of its batch. Rows of a step are of different sequences, so each is turned
as it would be alone: by the longer of its prompt and the token's own position, as `workers.models.layers.rope` does.

Legend: T tokens of the step, S rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.attention.backend import AttentionInputs


def long_from(config: Any, max_position: int) -> int | None:
    """The longest sequence with the short frequencies; None if they are the same for all."""
    long_ropes = [each for each in rope_parameters(config) if each.get("rope_type") == "longrope"]
    lengths = {int(each.get("original_max_position_embeddings") or max_position) for each in long_ropes}
    return max(lengths, default=None)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of all layers, or of each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in parameters.values() if isinstance(part, dict)]
    return parts or [parameters]


class LongTokens:
    """Which tokens of the current step have the long frequencies. `install` has a model's ropes read it."""

    def __init__(self, long_from: int) -> None:
        self._long_from = long_from
        self._long_T: torch.Tensor | None = None  # None: the tokens have no long position

    def begin(self, inputs: AttentionInputs, prompt_lens: Sequence[int]) -> None:
        if max(inputs.max_context, *prompt_lens) <= self._long_from:
            self._long_T = None
            return
        starts = torch.tensor(inputs.query_starts, device=inputs.positions_T.device)
        lens_S = torch.tensor(prompt_lens, device=inputs.positions_T.device)
        lens_T = torch.repeat_interleave(lens_S, starts.diff(), output_size=inputs.positions_T.shape[0])
        self._long_T = torch.maximum(lens_T, inputs.positions_T + 1) > self._long_from

    def install(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.forward = self._turning(module.forward)

    def _turning(self, turn: Any) -> Any:
        def forward(x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
            long_T = self._long_T
            if long_T is None:
                return turn(x, position_ids, *more, **named)
            beyond = position_ids.new_full((1, 1), self._long_from)  # makes the largest position a long one
            long = turn(x, torch.cat([position_ids, beyond], dim=1), *more, **named)
            short = turn(x, position_ids.clamp(max=self._long_from - 1), *more, **named)
            return tuple(
                torch.where(long_T[None, :, None], each[:, :-1], other) for each, other in zip(long, short, strict=True)
            )

        return forward
