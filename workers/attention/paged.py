"""Attention on GPUs: Triton kernels over the pages. Rows of one token are decoded, the others are computed in tiles of
queries. Nothing here waits for the device: the host plans the step's lengths and copies the plans. Legend as in `base`,
and: R rows of one token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from protos.values import LATENT
from workers.attention.backend import AttentionInputs, AttentionOptions, CosSin
from workers.kernels.latent_pages import (
    head_programs,
    heads_of_program,
    latent_decode,
    latent_prefill,
    latent_tile,
    latent_write,
)
from workers.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from workers.kernels.prefill import PrefillPlan, plan_prefill, prefill, prefill_tile
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.this_device import num_multiprocessors, overwrite, to_device
from workers.kv.kv_storage import KVStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The step's rows by kind. Rows without tokens have no kind."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]


class PagedAttention:
    """`attend` launches two kernels for the rows of one token and one for the others, for any batch.

    For CUDA graphs: steps of R rows of one token keep their plans at the same addresses. After the `begin` of such a
    step, a graph captured for R rows has the new lengths. Block tables and slots must stay at the captured addresses. A
    step of R rows must have run before the capture, so that the model's windows are known.
    """

    def __init__(self, storage: KVStorage, group: int = 0) -> None:
        self._storage = storage
        self._group = group
        self._device = storage.device
        self._num_multiprocessors = num_multiprocessors(self._device)
        self._is_latent = storage.is_latent(storage.layout.groups[group].layers[0])
        self._num_programs = storage.num_heads  # of an item of a decode plan
        self._inputs: AttentionInputs | None = None
        self._rows = _Rows(decode=(), prefill=())
        self._decode_plans: dict[tuple[int, int | None], DecodePlan] = {}
        self._prefill_plan: PrefillPlan | None = None
        self._planned: set[int | None] = set()

    def begin(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        counts = [stop - start for start, stop in pairwise(inputs.query_starts)]
        self._rows = _Rows(
            decode=tuple(row for row, count in enumerate(counts) if count == 1),
            prefill=tuple(row for row, count in enumerate(counts) if count > 1),
        )
        self._prefill_plan = None
        self._planned = set()
        for num_rows, window in tuple(self._decode_plans):
            if num_rows == len(self._rows.decode):
                self._plan_decode(inputs, window)

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        assert self._inputs is not None, "write before begin"
        if self._is_latent:
            self._num_programs = head_programs(q_TND.shape[1], q_TND.dtype)
            slots_T = self._inputs.tables[self._group].slots_T
            return latent_write(q_TND, k_TKD, *rotation, self._storage.part(layer, LATENT), slots_T)
        caches = self._storage.keys(layer), self._storage.values(layer)
        slots_T, scales = self._inputs.tables[self._group].slots_T, self._storage.scales(layer)
        return rope_kv_write(q_TND, k_TKD, v_TKD, *rotation, *caches, slots_T, scales)

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        inputs = self._inputs
        assert inputs is not None, "attend before begin"
        tables_SB = inputs.tables[self._group].block_tables_SB
        scale, window, latent = options.scale, options.window, options.value_dim is not None
        scoring: dict[str, Any] = {
            "scale": scale, "window": window, "softcap": options.softcap, "sinks_N": options.sinks_N
        }  # fmt: skip
        out_TND = q_TND.new_empty(*q_TND.shape[:2], options.value_dim or q_TND.shape[2])
        if not latent:
            scoring["scales"] = self._storage.scales(layer)
        if self._rows.decode:
            if window not in self._planned:
                self._plan_decode(inputs, window)
            plan = self._decode_plans[len(self._rows.decode), window]
            if not latent:
                keys, values = self._storage.keys(layer), self._storage.values(layer)
                paged_decode(q_TND, keys, values, out_TND, tables_SB, plan=plan, **scoring)
            else:
                latents = self._storage.part(layer, LATENT)
                latent_decode(q_TND, latents, out_TND, tables_SB, plan=plan, scale=scale)
        if self._rows.prefill:
            if self._prefill_plan is None:
                self._prefill_plan = self._plan_prefill(inputs, q_TND)
            if not latent:
                keys, values = self._storage.keys(layer), self._storage.values(layer)
                prefill(q_TND, keys, values, out_TND, tables_SB, plan=self._prefill_plan, **scoring)
            else:
                latents = self._storage.part(layer, LATENT)
                latent_prefill(q_TND, latents, out_TND, tables_SB, plan=self._prefill_plan, scale=scale)
        return out_TND

    def _plan_decode(self, inputs: AttentionInputs, window: int | None) -> None:
        arrays = plan_decode(
            self._rows.decode,
            inputs.query_starts,
            inputs.context_lens,
            window=window,
            num_kv_heads=self._num_programs,
            num_multiprocessors=self._num_multiprocessors,
        )
        key = len(self._rows.decode), window
        if key in self._decode_plans:
            plan = self._decode_plans[key]
            for target, array in zip((plan.items_W6, plan.parts_R3), arrays, strict=True):
                overwrite(target, array)
        else:
            items_W6, parts_R3 = map(self._move, arrays)
            self._decode_plans[key] = DecodePlan(items_W6=items_W6, parts_R3=parts_R3)
        self._planned.add(window)

    def _plan_prefill(self, inputs: AttentionInputs, q_TND: torch.Tensor) -> PrefillPlan:
        if self._is_latent:
            group = heads_of_program(q_TND.shape[1], q_TND.dtype)
            tile = latent_tile(q_TND.dtype, heads=group, prompts=True)
        else:
            group = q_TND.shape[1] // self._storage.num_heads
            keys = self._storage.keys(self._storage.layout.groups[self._group].layers[0])
            tile = prefill_tile(q_TND.shape[2], group, q_TND.dtype, inputs.max_query, rounded=keys.itemsize == 1)
        work_W4 = plan_prefill(self._rows.prefill, inputs.query_starts, inputs.context_lens, group=group, tile=tile)
        return PrefillPlan(work_W4=self._move(work_W4), tile=tile)

    def _move(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)
