"""Totals of a pool's workers since the router's start."""

from __future__ import annotations

from dataclasses import dataclass

from protos.values import WorkerLoad


@dataclass(slots=True)
class PoolTotals:
    """Totals of a pool's workers, removed ones included, since the router's start. They only grow."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    transfer_hidden_s: float = 0.0
    num_losses: int = 0
    num_pauses: int = 0

    def note(self, before: WorkerLoad, load: WorkerLoad) -> None:
        """Adds what a worker did between two loads; it may have started anew meanwhile."""
        self.num_output_tokens += max(0, load.num_output_tokens - before.num_output_tokens)
        self.transfer_bytes += max(0, load.transfer_bytes - before.transfer_bytes)
        self.transfer_s += max(0.0, load.transfer_s - before.transfer_s)
        self.transfer_hidden_s += max(0.0, load.transfer_hidden_s - before.transfer_hidden_s)
