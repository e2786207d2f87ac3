"""An engine's recent speed of prefill and decode."""

from __future__ import annotations

import math

from workers.batch import Batch

_KEEP = 0.9
_LEAST_PREFILL = 32


class EngineSpeed:
    """Averages over recent steps: each step counts a tenth less than the next.

    Two kinds of steps do not count. The first step of a kind touches memory and loads code that later steps find ready.
    A step with few prompt tokens consists mostly of its fixed cost, which would look like a low speed.
    `num_prompt_tokens` counts those of all steps; a row that computes one position counts as decoding.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self._has_prefilled = False
        self._has_decoded = False
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._decode_steps = 0.0
        self._decode_s = 0.0

    def observe(self, batch: Batch, elapsed_s: float) -> None:
        """Records a step. The time of a mixed step is divided by tokens for prefill, and counts in full as a decode
        step: the decoding clients waited for all of it."""
        chunks = [row.num_tokens for row in batch.rows if not row.is_decode]
        if chunks:
            num_prefill = sum(chunks)
            self.num_prompt_tokens += num_prefill
            if self._has_prefilled and num_prefill >= _LEAST_PREFILL:
                self._prefill_tokens = self._prefill_tokens * _KEEP + num_prefill
                self._prefill_s = self._prefill_s * _KEEP + elapsed_s * num_prefill / batch.num_tokens
            self._has_prefilled = True
        if len(chunks) < len(batch.rows):
            self.observe_decode(elapsed_s)

    def observe_decode(self, elapsed_s: float) -> None:
        if self._has_decoded:
            self._decode_steps = self._decode_steps * _KEEP + 1
            self._decode_s = self._decode_s * _KEEP + elapsed_s
        self._has_decoded = True

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second; 0 until measured."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds per step; 0 until measured. The value is rounded to six binary digits, so that gateways are not
        notified of changes too small to alter a decision."""
        mantissa, exponent = math.frexp(self._decode_s / self._decode_steps if self._decode_steps else 0.0)
        return math.ldexp(round(mantissa * 64), exponent - 6)
