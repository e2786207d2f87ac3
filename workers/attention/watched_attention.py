"""An attention backend that reports each layer whose keys and values are in the cache, so that they may be pushed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.attention.backend import AttentionBackend, AttentionInputs, AttentionOptions, CosSin


class WatchedAttention:
    """Wraps a backend and computes nothing itself. On CUDA "written" means queued: work queued later is ordered after
    it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._watchers: list[Callable[[int], None]] = []

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Calls `watcher` with every written layer, in order, from the thread that runs the model."""
        self._watchers.append(watcher)

    def begin(self, inputs: AttentionInputs) -> None:
        self._backend.begin(inputs)

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        turned_TND = self._backend.write(layer, q_TND, k_TKD, v_TKD, rotation)
        self.notify(layer)
        return turned_TND

    def notify(self, layer: int) -> None:
        """Reports a layer, and all layers before it, as written. For writers other than `write`, such as a graph."""
        for watcher in self._watchers:
            watcher(layer)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        return self._backend.attend(layer, q_TND, options)
