"""Attention on CPUs: a compiled kernel that reads the pages in place, and its twin in torch.

In torch, decode rows are computed in padded batches, each prefill row alone over its own pages.

Legend as in `base`, and: G queries that share a key/value head (N / K), Q tokens of one row, C positions of the pages
that are read (a window skips the earlier pages).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from protos.values import LATENT
from workers.attention.backend import AttentionBackend, AttentionInputs, AttentionOptions, CosSin
from workers.attention.grouped_attention import GroupedAttention
from workers.attention.latent_cpu import NativeLatentAttention
from workers.attention.reference_attention import ReferenceAttention
from workers.kernels import cpu, twins
from workers.kernels.cpu.layers import RowTables
from workers.kernels.cpu.native_build import Native, Tiles, native, native_tiles
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


class NativeAttention:
    """Attention by a compiled kernel, one call per layer over all rows: attention.cpp, attention_rounded.cpp or
    attention_tiles.cpp in `workers/kernels/cpu`. `kernels` are those of this processor unless they are given."""

    def __init__(self, storage: KVStorage, kernels: Native | Tiles | None = None, group: int = 0) -> None:
        self._group = group
        self._given = kernels
        self.caches = {
            layer: LayerCache(keys=storage.keys(layer), values=storage.values(layer), scales=storage.scales(layer))
            for layer in storage.layout.groups[group].layers
        }
        self._described = {layer: cache.described() for layer, cache in self.caches.items()}
        self._rows: RowTables | None = None

    def kernels_for(self, dtype: torch.dtype) -> Native | Tiles:
        """The compiled kernels for queries of this dtype."""
        keys = next(iter(self.caches.values())).keys
        kernels, tiles = self._given or native(dtype), native_tiles()
        fits = keys.dtype == torch.bfloat16 and keys.shape[-1] % _TILE_DEPTH == 0
        if self._given is None and fits and tiles is not None:
            return tiles
        assert kernels is not None, f"queries are {dtype}"
        return kernels

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
        self.kernels_for(q_TND.dtype).attend(
            q_TND.data_ptr(),
            ctypes.byref(self._described[layer]),
            out_TND.data_ptr(),
            step.query_starts.data_ptr(),
            step.context_lens.data_ptr(),
            step.block_tables_SB.data_ptr(),
            None if sinks_N is None else sinks_N.data_ptr(),
            step.block_tables_SB.stride(0),
            step.context_lens.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            options.window or 0,
            q_TND.stride(0),
            options.scale,
            options.softcap,
            torch.get_num_threads(),
        )
        return out_TND


def has_same_bits(backend: AttentionBackend) -> bool:
    """Whether a token's numbers are the same in a row of its own and in a row of several tokens."""
    if isinstance(backend, GroupedAttention):
        return all(has_same_bits(one) for one in backend.backends)
    return isinstance(backend, NativeAttention | NativeLatentAttention)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeBatch:
    """Rows of one token, whose contexts differ by less than a factor of two.

    `pages` index the cache as [blocks * K, block size * D]; `hidden` are the (row, position) pairs that the mask leaves
    out: their contents are zeroed, since not even a weight of zero hides another sequence's NaN.
    """

    tokens_S: torch.Tensor
    pages: torch.Tensor
    mask_S11C: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillRow:
    """Tokens [start, stop) of the batch. `mask_QC` is None where the row sees no cached context and no window."""

    start: int
    stop: int
    pages: torch.Tensor
    num_visible: int
    mask_QC: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The batches and rows of one step, the same for every layer with the same window."""

    decodes: tuple[_DecodeBatch, ...]
    prefills: tuple[_PrefillRow, ...]


def _attend(
    options: AttentionOptions,
    q_KGQD: torch.Tensor,
    k_KGCD: torch.Tensor,
    v_KGCD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    heads: tuple[int, ...],
) -> torch.Tensor:
    """Attention of [K, G, Q, D], or of [S, K, G, D] where the G queries of a head take the place of tokens. No mask:
    causal. `heads` is the shape in which the sinks of all heads broadcast to the queries."""
    scale, softcap, sinks = options.scale, options.softcap, options.sinks_N
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(
            q_KGQD, k_KGCD, v_KGCD, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    sinks = None if sinks is None else sinks.view(heads)
    return twins.attention(q_KGQD, k_KGCD, v_KGCD, mask, scale=scale, softcap=softcap, sinks_Q=sinks)


class TorchAttention(ReferenceAttention):
    """Attention in torch. It runs wherever torch does and is made for CPUs."""

    def __init__(self, storage: KVStorage, group: int = 0) -> None:
        super().__init__(storage, group)
        self._block_size = storage.layout.block_size
        self._plans: dict[int | None, _Plan] = {}

    def begin(self, inputs: AttentionInputs) -> None:
        super().begin(inputs)
        self._plans = {}

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        assert self._inputs is not None, "attend before begin"
        window = options.window
        if window not in self._plans:
            self._plans[window] = self._plan(self._inputs, window)
        plan = self._plans[window]
        out_TND = q_TND.new_empty(*q_TND.shape[:2], options.value_dim or q_TND.shape[2])
        for decode in plan.decodes:
            self._decode(layer, decode, q_TND, out_TND, options)
        for row in plan.prefills:
            self._prefill(layer, row, q_TND, out_TND, options)
        return out_TND

    def _decode(
        self, layer: int, batch: _DecodeBatch, q_TND: torch.Tensor, out_TND: torch.Tensor, options: AttentionOptions
    ) -> None:
        num_rows = len(batch.tokens_S)
        k_SKCD, v_SKCD = self._read(layer, batch.pages, num_rows, options.value_dim)
        rows, positions = batch.hidden
        k_SKCD[rows, :, positions] = 0
        v_SKCD[rows, :, positions] = 0
        # The G queries of a key/value head take the place of a sequence's tokens: nothing is expanded.
        q_SKGD = q_TND[batch.tokens_S].view(num_rows, self._storage.num_heads, -1, q_TND.shape[-1]).to(k_SKCD.dtype)
        out_SKGD = _attend(options, q_SKGD, k_SKCD, v_SKCD, batch.mask_S11C, heads=tuple(q_SKGD.shape[1:3]))
        out_TND[batch.tokens_S] = out_SKGD.reshape(num_rows, *out_TND.shape[1:]).to(q_TND.dtype)

    def _prefill(
        self, layer: int, row: _PrefillRow, q_TND: torch.Tensor, out_TND: torch.Tensor, options: AttentionOptions
    ) -> None:
        k_1KCD, v_1KCD = self._read(layer, row.pages, 1, options.value_dim)
        k_KCD, v_KCD = k_1KCD[0, :, : row.num_visible], v_1KCD[0, :, : row.num_visible]
        q_QND = q_TND[row.start : row.stop].to(k_KCD.dtype)
        num_kv_heads, head_dim = self._storage.num_heads, q_TND.shape[-1]
        q_KGQD = q_QND.transpose(0, 1).view(num_kv_heads, -1, row.stop - row.start, head_dim)
        group = q_KGQD.shape[1]
        k_KGCD, v_KGCD = (heads_KCD.unsqueeze(1).expand(-1, group, -1, -1) for heads_KCD in (k_KCD, v_KCD))
        out_KGQD = _attend(options, q_KGQD, k_KGCD, v_KGCD, row.mask_QC, heads=(num_kv_heads, group, 1))
        out_TND[row.start : row.stop] = out_KGQD.flatten(0, 1).transpose(0, 1)

    def _read(
        self, layer: int, pages: torch.Tensor, num_rows: int, value_dim: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the pages as [rows, K, C, D]: one copy, page by page, of latents for both. In float32 if
        they are in 8 bits."""
        if value_dim is not None:
            latents = self._copied(self._storage.part(layer, LATENT), None, pages, num_rows)
            return latents, latents[..., :value_dim]
        scales = self._storage.scales(layer) or (None, None)
        keys, values = self._storage.keys(layer), self._storage.values(layer)
        return self._copied(keys, scales[0], pages, num_rows), self._copied(values, scales[1], pages, num_rows)

    def _copied(
        self, cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        num_heads, head_dim = cache.shape[1], cache.shape[3]
        copied = _pages_of(cache, pages).view(num_rows, num_heads, -1, head_dim)
        if scales is None:
            return copied
        if scales.dim() == 1:
            return copied.float() * scales[:, None, None]
        return copied.float() * _pages_of(scales, pages).view(num_rows, num_heads, -1, 1)

    def _plan(self, inputs: AttentionInputs, window: int | None) -> _Plan:
        buckets: dict[int, list[int]] = {}
        prefills = []
        for row, context_len in enumerate(inputs.context_lens):
            start, stop = inputs.query_starts[row], inputs.query_starts[row + 1]
            if stop - start > 1:
                prefills.append(self._plan_prefill(inputs, row, window))
            else:
                num_pages = self._last_page(context_len) - self._first_page(context_len - 1, window)
                buckets.setdefault((num_pages - 1).bit_length(), []).append(row)
        decodes = tuple(self._plan_decode(inputs, rows, window) for rows in buckets.values())
        return _Plan(decodes=decodes, prefills=tuple(prefills))

    def _plan_prefill(self, inputs: AttentionInputs, row: int, window: int | None) -> _PrefillRow:
        start, stop = inputs.query_starts[row], inputs.query_starts[row + 1]
        context_len = inputs.context_lens[row]
        first_position = context_len - (stop - start)
        first_page = self._first_page(first_position, window)
        first_seen = first_page * self._block_size
        mask_QC = None
        if first_position > 0 or (window is not None and context_len > window):
            device = inputs.tables[self._group].block_tables_SB.device
            positions_Q1 = torch.arange(first_position, context_len, device=device).unsqueeze(1)
            positions_C = torch.arange(first_seen, context_len, device=device)
            mask_QC = positions_C <= positions_Q1
            if window is not None:
                mask_QC &= positions_C > positions_Q1 - window
        table_B = inputs.tables[self._group].block_tables_SB[row, first_page : self._last_page(context_len)]
        return _PrefillRow(
            start=start,
            stop=stop,
            pages=self._pages(table_B.unsqueeze(0)),
            num_visible=context_len - first_seen,
            mask_QC=mask_QC,
        )

    def _plan_decode(self, inputs: AttentionInputs, rows: list[int], window: int | None) -> _DecodeBatch:
        device = inputs.tables[self._group].block_tables_SB.device
        lens = [inputs.context_lens[row] for row in rows]
        first_pages = [self._first_page(context_len - 1, window) for context_len in lens]
        width = max(self._last_page(n) - first for n, first in zip(lens, first_pages, strict=True))
        first_S1 = torch.tensor(first_pages, device=device).unsqueeze(1)
        # A row with fewer pages repeats its last one; the mask hides it.
        last_S1 = torch.tensor([self._last_page(n) - 1 for n in lens], device=device).unsqueeze(1)
        columns_SB = torch.minimum(first_S1 + torch.arange(width, device=device), last_S1)
        rows_S = torch.tensor(rows, device=device)
        tables_SB = inputs.tables[self._group].block_tables_SB[rows_S.unsqueeze(1), columns_SB]
        lens_S1 = torch.tensor(lens, device=device).unsqueeze(1)
        positions_SC = first_S1 * self._block_size + torch.arange(width * self._block_size, device=device)
        visible_SC = positions_SC < lens_S1
        if window is not None:
            visible_SC &= positions_SC >= lens_S1 - window
        hidden_rows, hidden_positions = (~visible_SC).nonzero(as_tuple=True)
        return _DecodeBatch(
            tokens_S=torch.tensor([inputs.query_starts[row] for row in rows], device=device),
            pages=self._pages(tables_SB),
            mask_S11C=visible_SC[:, None, None, :],
            hidden=(hidden_rows, hidden_positions),
        )

    def _first_page(self, position: int, window: int | None) -> int:
        """The first page that the token at `position` sees."""
        return 0 if window is None else max(0, position + 1 - window) // self._block_size

    def _last_page(self, context_len: int) -> int:
        return -(-context_len // self._block_size)

    def _pages(self, tables_SB: torch.Tensor) -> torch.Tensor:
        """Indices of [row, head, page] into the cache seen as [blocks * K, ...], flat."""
        num_heads = self._storage.num_heads
        heads_K1 = torch.arange(num_heads, device=tables_SB.device).unsqueeze(1)
        return (tables_SB.long().unsqueeze(1) * num_heads + heads_K1).flatten()


def _pages_of(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Rows of the cache seen as [blocks * K, ...]."""
    whole = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return whole.reshape(-1, cache[0, 0].numel()).index_select(0, pages).view(cache.dtype)
