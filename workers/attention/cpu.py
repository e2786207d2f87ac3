"""Attention on CPUs: compiled kernels that read the pages in place, one call per layer over all rows.

Legend as in `workers.attention.backend`, and W the numbers of a latent.
"""

from __future__ import annotations

import ctypes

import torch

from protos.values import LATENT
from workers.attention.backend import AttentionBackend, AttentionInputs, AttentionOptions, CosSin
from workers.attention.grouped_attention import GroupedAttention
from workers.attention.torch_attention import TorchAttention
from workers.kernels import cpu, twins
from workers.kernels.cpu.layers import RowTables
from workers.kernels.cpu.native_build import Native, Tiles, native, native_tiles, pointers
from workers.kernels.cpu.pages import LayerCache
from workers.kv.kv_storage import KVStorage

_TILE_DEPTH = 32


def cpu_attention(storage: KVStorage, group: int = 0) -> AttentionBackend:
    """The compiled backend. If nothing can be compiled, or the kernel does not support the cache's dtype, torch's."""
    first = storage.layout.groups[group].layers[0]
    if storage.is_latent(first):
        kernels = native(storage.part(first, LATENT).dtype)
        return TorchAttention(storage, group) if kernels is None else NativeLatentAttention(storage, kernels, group)
    rounded = storage.scales(first) is not None
    kernels = native(torch.float32 if rounded else storage.keys(first).dtype)
    return TorchAttention(storage, group) if kernels is None else NativeAttention(storage, group=group)


class CompiledAttention:
    """`kernels` are those of this processor unless they are given."""

    def __init__(self, storage: KVStorage, kernels: Native | Tiles | None = None, group: int = 0) -> None:
        self._group = group
        self._given = kernels
        self.caches = {layer: self._cache(storage, layer) for layer in storage.layout.groups[group].layers}
        self._described = {layer: cache.described() for layer, cache in self.caches.items()}
        self._rows: RowTables | None = None

    def _cache(self, storage: KVStorage, layer: int) -> LayerCache:
        return LayerCache(keys=storage.keys(layer), values=storage.values(layer), scales=storage.scales(layer))

    def kernels_for(self, dtype: torch.dtype) -> Native | Tiles:
        keys = next(iter(self.caches.values())).keys
        kernels, tiles = self._given or native(dtype), native_tiles()
        fits = keys.dtype == torch.bfloat16 and keys.shape[-1] % _TILE_DEPTH == 0
        if self._given is None and fits and tiles is not None:
            return tiles
        assert kernels is not None, f"queries are {dtype}"
        return kernels

    @property
    def rows(self) -> RowTables:
        assert self._rows is not None, "no step has begun"
        return self._rows

    def begin(self, inputs: AttentionInputs) -> None:
        tables = inputs.tables[self._group]
        self._rows = RowTables(
            slots_T=tables.slots_T.contiguous(),
            query_starts=torch.tensor(inputs.query_starts),
            context_lens=torch.tensor(inputs.context_lens),
            block_tables_SB=tables.block_tables_SB.contiguous(),
        )


class NativeAttention(CompiledAttention):
    """attention.cpp, attention_rounded.cpp or attention_tiles.cpp in `workers/kernels/cpu`."""

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        cache, slots_T = self.caches[layer], self.rows.slots_T
        return cpu.rope_kv_write(q_TND, k_TKD, v_TKD, *rotation, cache.keys, cache.values, slots_T, cache.scales)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        step, cache, sinks_N = self.rows, self.caches[layer], options.sinks_N
        dtype = cache.keys.dtype
        assert cache.scales is not None or q_TND.dtype == dtype, f"queries are {q_TND.dtype}, the cache {dtype}"
        assert sinks_N is None or sinks_N.dtype == torch.float32, f"sinks are {sinks_N.dtype}"
        if not cpu.has_whole_rows(q_TND):
            q_TND = q_TND.contiguous()
        out_TND = cpu.empty_heads(q_TND, q_TND.stride(0))
        _, num_heads, head_dim = q_TND.shape
        _, num_kv_heads, block_size, _ = cache.keys.shape
        tables_SB = step.block_tables_SB
        self.kernels_for(q_TND.dtype).attend(
            q_TND.data_ptr(), ctypes.byref(self._described[layer]),
            *pointers(out_TND, step.query_starts, step.context_lens, tables_SB, sinks_N),
            tables_SB.stride(0), len(tables_SB), num_heads, num_kv_heads, head_dim, block_size, options.window or 0,
            q_TND.stride(0), options.scale, options.softcap, torch.get_num_threads(),
        )  # fmt: skip
        return out_TND


class NativeLatentAttention(CompiledAttention):
    """latent.cpp. Prompts and tokens that decode take the same path, so that a token's bits do not depend on its
    step."""

    def _cache(self, storage: KVStorage, layer: int) -> LayerCache:
        latents = storage.part(layer, LATENT)
        return LayerCache(keys=latents, values=latents)

    def kernels_for(self, dtype: torch.dtype) -> Native:
        assert isinstance(self._given, Native)
        return self._given

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
        tables_SB = step.block_tables_SB
        self.kernels_for(cache.dtype).attend_latent(
            *pointers(q_TND, cache, out_TND, step.query_starts, step.context_lens, tables_SB),
            tables_SB.stride(0), len(tables_SB), num_heads, width, value_dim, cache.shape[2],
            q_TND.stride(0), out_TND.stride(0), options.scale, torch.get_num_threads(),
        )  # fmt: skip
        return out_TND


def has_same_bits(backend: AttentionBackend) -> bool:
    """Whether a token's numbers are the same in a row of its own and in a row of several tokens."""
    if isinstance(backend, GroupedAttention):
        return all(has_same_bits(of_group) for of_group in backend.backends)
    return isinstance(backend, CompiledAttention)
