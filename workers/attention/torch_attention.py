"""Attention in plain torch: what the fast backends are compared with, and what CPUs without a compiler do."""

from __future__ import annotations

import torch

from protos.values import LATENT
from workers.attention.backend import AttentionInputs, AttentionOptions, CosSin
from workers.kernels import twins
from workers.kv.kv_storage import KVStorage


class TorchAttention:
    def __init__(self, storage: KVStorage, group: int = 0) -> None:
        self._storage = storage
        self._group = group
        self._inputs: AttentionInputs | None = None

    def begin(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        assert self._inputs is not None, "write before begin"
        slots_T = self._inputs.tables[self._group].slots_T
        if self._storage.is_latent(layer):
            return twins.latent_write(q_TND, k_TKD, *rotation, self._storage.part(layer, LATENT), slots_T)
        caches = self._storage.keys(layer), self._storage.values(layer)
        return twins.rope_kv_write(q_TND, k_TKD, v_TKD, *rotation, *caches, slots_T, self._storage.scales(layer))

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        assert self._inputs is not None, "attend before begin"
        keys, values = self._storage.keys_values(layer, options.value_dim)
        return twins.paged_attention(
            q_TND,
            keys,
            values,
            query_starts=self._inputs.query_starts,
            context_lens=self._inputs.context_lens,
            block_tables_SB=self._inputs.tables[self._group].block_tables_SB,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks_N=options.sinks_N,
            scales=self._storage.scales(layer),
        )
