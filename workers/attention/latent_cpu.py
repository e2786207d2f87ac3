"""Latent attention on CPUs by compiled code (workers/kernels/cpu/latent.cpp). Legend as in `base`, and W the numbers of
a latent."""

from __future__ import annotations

import torch

from protos.values import LATENT
from workers.attention.backend import AttentionInputs, AttentionOptions, CosSin
from workers.kernels import twins
from workers.kernels.cpu.layers import RowTables
from workers.kernels.cpu.native_build import Native
from workers.kernels.cpu.pages import LayerCache
from workers.kv.kv_storage import KVStorage


class NativeLatentAttention:
    """Prompts and tokens that decode take the same path, so that a token's bits do not depend on its step."""

    def __init__(self, storage: KVStorage, kernels: Native, group: int = 0) -> None:
        self._kernels = kernels
        self._group = group
        latents = {layer: storage.part(layer, LATENT) for layer in storage.layout.groups[group].layers}
        self.caches = {layer: LayerCache(keys=part, values=part) for layer, part in latents.items()}
        self._rows: RowTables | None = None

    def kernels_for(self, dtype: torch.dtype) -> Native:
        return self._kernels

    @property
    def rows(self) -> RowTables:
        """The tables of the current step's rows."""
        assert self._rows is not None, "no step has begun"
        return self._rows

    def begin(self, inputs: AttentionInputs) -> None:
        self._rows = RowTables.of(inputs, self._group)

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        return twins.latent_write(q_TND, k_TKD, *rotation, self.caches[layer].keys, self.rows.slots_T)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        step, cache, value_dim = self.rows, self.caches[layer].keys, options.value_dim
        assert value_dim is not None, "latents have a value's size"
        assert options.window is None, f"window is {options.window}"
        assert not options.softcap, f"soft cap is {options.softcap}"
        assert options.sinks_N is None, "latent attention has no sinks"
        assert q_TND.dtype == cache.dtype, f"queries are {q_TND.dtype}, the cache {cache.dtype}"
        q_TND = q_TND.contiguous()
        num_tokens, num_heads, width = q_TND.shape
        out_TND = q_TND.new_empty(num_tokens, num_heads, value_dim)
        self._kernels.attend_latent(
            q_TND.data_ptr(),
            cache.data_ptr(),
            out_TND.data_ptr(),
            step.query_starts.data_ptr(),
            step.context_lens.data_ptr(),
            step.block_tables_SB.data_ptr(),
            step.block_tables_SB.stride(0),
            step.context_lens.shape[0],
            num_heads,
            width,
            value_dim,
            cache.shape[2],
            q_TND.stride(0),
            out_TND.stride(0),
            options.scale,
            torch.get_num_threads(),
        )
        return out_TND
