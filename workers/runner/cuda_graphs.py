"""Decode steps as CUDA graphs: a model's hundreds of launches, recorded once for each padded size, replayed as one.

    capture   for each size: a step of padding, eagerly (compiles kernels, makes plans), then recorded
    replay    step's numbers ──▶ the places that were recorded      attention.begin: plans at their places
              graph of its size ──▶ logits at their place, of which the first rows are the step's

Tensors that depend on a step must have the addresses that were recorded: this file's tensors, and the attention's
plans. Sampling is not recorded: it differs between steps, and it has few launches. Legend: P rows of a padded step, B
blocks of the longest sequence there may be, G groups of the KV layout, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from workers.attention.backend import AttentionBackend, GroupTables
from workers.models.decoder import Decoder, ModelInputs
from workers.models.interface import ServedDecoder
from workers.models.rope_kinds import DynamicRope, LongRope
from workers.runner.packed_batch import Packed
from workers.runner.padding import captured_sizes, nothing, size_for

log = logging.getLogger("baton.worker")

_cuda: Any = torch.cuda


class Recorder(Protocol):
    """Records the launches of `run`, without using their results, and returns a function that repeats them."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """Records CUDA graphs. All graphs share one memory pool, because they run one after the other: record the largest
    first."""

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # while other threads move KV
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def why_eager(decoder: ServedDecoder) -> str:
    """Returns why steps of this model cannot be replayed; "" if they can."""
    if not isinstance(decoder, Decoder):
        return "transformers computes its layers"
    if any(isinstance(rope, DynamicRope | LongRope) for rope in decoder.config.ropes):
        return "its rope's frequencies depend on each sequence's length"
    if decoder.waits:
        return "its experts' weights are quantised, and are multiplied one expert after the other"
    return ""


class DecodeGraphs:
    """The graphs of decode steps. `num_replayed` and `num_eager` count launched steps."""

    def __init__(
        self,
        decoder: ServedDecoder,
        attention: AttentionBackend,
        recorder: Recorder,
        *,
        max_rows: int,
        max_blocks: int,
        num_groups: int = 1,
    ) -> None:
        device = decoder.context.device
        self._decoder = decoder
        self._attention = attention
        self._recorder = recorder
        self._sizes = captured_sizes(max_rows)
        self._numbers_GP = torch.zeros((2 + num_groups, max_rows), dtype=torch.int64, device=device)
        self._tables_GPB = torch.zeros((num_groups, max_rows, max_blocks), dtype=torch.int32, device=device)
        self._logits_PV = torch.zeros((max_rows, decoder.config.vocab_size), device=device)
        self._rows_P = torch.arange(max_rows, device=device)
        self._generation = decoder.generation
        self._replays: dict[int, Callable[[], None]] = {}
        self.num_replayed = 0
        self.num_eager = 0

    @torch.inference_mode()
    def capture(self, place: Callable[[Packed], ModelInputs]) -> None:
        """Records all sizes, once, before the first step. `place` puts a step's arrays on the device. With several
        ranks all must capture at the same time: their collectives are recorded too."""
        start_s = time.perf_counter()
        for count, size in enumerate(reversed(self._sizes), 1):
            step = nothing(size, len(self._tables_GPB))
            inputs = self._put(place(step), size)

            def run(inputs: ModelInputs = inputs, size: int = size) -> None:
                self._logits_PV[:size].copy_(self._decoder.forward(inputs, self._attention))

            self._attention.begin(inputs.attention)
            run()
            self._attention.begin(inputs.attention)
            self._replays[size] = self._recorder.record(run)
            log.info("captured the decode step of %d rows, %d of %d", size, count, len(self._sizes))
        self._decoder.context.parallel.before_close(self._replays.clear)
        log.info("captured %d decode steps in %.1f s", len(self._sizes), time.perf_counter() - start_s)

    def size_for(self, packed: Packed) -> int | None:
        """Counts the step and returns its padded size, or None if it must run eagerly."""
        size = size_for(packed, self._sizes)
        self.num_replayed += size is not None
        self.num_eager += size is None
        return size

    def replay(self, inputs: ModelInputs, size: int) -> torch.Tensor:
        """The logits [size, V] of a padded step. They are valid until the next replay."""
        assert self._decoder.generation == self._generation, "the weights have moved since the graphs were captured"
        self._attention.begin(self._put(inputs, size).attention)
        self._replays[size]()
        return self._logits_PV[:size]

    def _put(self, inputs: ModelInputs, size: int) -> ModelInputs:
        attention = inputs.attention
        numbers = inputs.token_ids_T, attention.positions_T, *(group.slots_T for group in attention.tables)
        for place_P, numbers_P in zip(self._numbers_GP, numbers, strict=True):
            place_P[:size].copy_(numbers_P)
        for place_PB, group in zip(self._tables_GPB, attention.tables, strict=True):
            place_PB[:size, : group.block_tables_SB.shape[1]].copy_(group.block_tables_SB)
        token_ids_P, positions_P, *slots = self._numbers_GP[:, :size]
        tables = tuple(
            GroupTables(slots_T=slots_P, block_tables_SB=place_PB[:size])
            for slots_P, place_PB in zip(slots, self._tables_GPB, strict=True)
        )
        return ModelInputs(
            token_ids_T=token_ids_P,
            attention=replace(attention, positions_T=positions_P, tables=tables),
            logit_rows=self._rows_P[:size],
            prompt_lens=inputs.prompt_lens,
        )
