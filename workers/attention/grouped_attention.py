"""Attention over several groups of layers, with one backend and its own block tables per group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from protos.values import KVLayout
from workers.attention.backend import AttentionBackend, AttentionInputs, AttentionOptions, CosSin


class GroupedAttention:
    def __init__(self, layout: KVLayout, backends: Sequence[AttentionBackend]) -> None:
        self.layout = layout
        self.backends = tuple(backends)
        self._of_layer = {
            layer: backend for group, backend in zip(layout.groups, backends, strict=True) for layer in group.layers
        }

    def begin(self, inputs: AttentionInputs) -> None:
        for backend in self.backends:
            backend.begin(inputs)

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        return self._of_layer[layer].write(layer, q_TND, k_TKD, v_TKD, rotation)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        return self._of_layer[layer].attend(layer, q_TND, options)


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
