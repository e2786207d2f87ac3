"""Runs batches on a model: one forward pass, then sampling on rank 0. On a GPU `launch` queues all of it and returns.

    launch n      pack ── pinned, queued ──▶ forward ──▶ sample ──▶ ids ── queued ──▶ pinned ── fetch n
    launch n + 1  pack ────────────────────▶ forward  ◀── tokens that follow ──┘

CPU and CUDA share every line. Legend: T tokens of the batch (rows packed), R positions with logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from protos.errors import InvalidRequest
from protos.values import ErrorInfo, Logprobs
from protos.wire import error_info
from workers.attention.base import AttentionBackend, AttentionInputs, GroupTables
from workers.attention.watched import WatchedAttention
from workers.batch import Batch, CompletedStep, PendingStep, Row, RowOutput, Sample, StepOutput, is_penalised
from workers.grammar.base import Grammars, Mask
from workers.kernels.staging import Queued, to_device
from workers.models.decoder import Decoder, ModelInputs
from workers.runner.cuda_graphs import DecodeGraphs, Recorder
from workers.runner.device_clock import DeviceClock, TimedStep
from workers.runner.fused_layers import fused_layers
from workers.runner.packing import Packed, pack, sampled_rows
from workers.runner.padding import padded
from workers.sampling.logprobs import TokenScores
from workers.sampling.penalties import NONE
from workers.sampling.sampler import Drawn, sample
from workers.timeline import Timeline


class TorchRunner:
    """One rank's runner: a pipeline. All ranks must launch the same batches; only rank 0 samples.

    `shares_tokens` sends sampled ids to the other ranks, for rows that depend on them: needed with steps in flight.
    `grammars` make masks for rows with a grammar, while the device computes the logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        block_size: int,
        shares_tokens: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = WatchedAttention(attention)
        self._through = fused_layers(decoder, attention, self._attention.notify)
        self._block_size = block_size
        self._grammars = grammars
        self._device = decoder.context.device
        self._parallel = decoder.context.parallel
        self._shares_tokens = shares_tokens and self._parallel.size > 1
        self._sampled: Mapping[int, int] = {}
        self._ids_R = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._timeline = Timeline(time.monotonic)
        self._device_clock: DeviceClock | None = None
        self.graphs: DecodeGraphs | None = None

    def run(self, batch: Batch) -> StepOutput:
        """Runs one step by itself. Raises as `launch` does."""
        return self.launch(batch).fetch()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Launches a step. Raises WorkerLost if a rank has ended, and torch's own error if memory runs out."""
        timed = self._device_clock.begin() if self._device_clock is not None and self._timeline.recording else None
        packed = pack(batch, block_size=self._block_size, sampled=self._sampled)
        latest_R = self._latest(batch)
        self._sampled = sampled_rows(batch)
        with self._timeline.span("forward", batch):
            logits_RV = self._forward(packed)
        if self._parallel.rank:
            self._ids_R = torch.zeros(len(self._sampled), dtype=torch.int64, device=self._device)
            self._share()
            return CompletedStep(output=StepOutput(rows=()))
        with self._timeline.span("sample", batch):
            step = Sampling(batch, logits_RV, latest_R, timed, grammars=self._grammars)
        if step.drawn is not None:
            self._ids_R = step.drawn.ids_R
            self._share()
        if timed is not None:
            timed.stop()
        return step

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Calls `watcher` with each layer whose keys and values a step has written, or queued, in order and within
        `launch`; for a replayed step with the last layer only."""
        self._attention.watch(watcher)

    def record(self, timeline: Timeline) -> None:
        """Records the forward pass and the sampling of each launch in `timeline`. On a GPU these are the times to queue
        them, and, by CUDA events, when the device began and ended the step."""
        self._timeline = timeline
        if torch.device(self._device).type == "cuda":
            self._device_clock = DeviceClock(timeline.now)

    def capture(self, recorder: Recorder, *, max_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        """Captures decode-only steps, which are replayed from now on. Call it once, on all ranks at the same time."""
        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "num_groups": num_groups}
        self.graphs = DecodeGraphs(self._decoder, self._attention, recorder, **sizes)
        self.graphs.capture(self._inputs)

    def _forward(self, packed: Packed) -> torch.Tensor:
        """Queues the forward pass. Returns the logits [R, V]."""
        size = self.graphs.size_for(packed) if self.graphs is not None else None
        if self.graphs is None or size is None:
            return self._decoder.forward(self._inputs(packed), self._attention, self._through)
        logits_RV = self.graphs.replay(self._inputs(padded(packed, size)), size)[: len(packed.logit_rows_R)]
        self._attention.notify(self._decoder.config.num_layers - 1)
        return logits_RV

    def _latest(self, batch: Batch) -> torch.Tensor | None:
        """For each sampling row, the token before the sampled one, if penalties must count it."""
        places = [
            self._sampled[row.depends_on_row]
            if row.depends_on_row is not None and is_penalised(row.sample.params)
            else NONE
            for row in batch.rows
            if row.sample is not None
        ]
        if not any(place != NONE for place in places):
            return None
        places_R = to_device(np.array(places), self._device)
        return torch.where(places_R < 0, NONE, self._ids_R[places_R.clamp(min=0)])

    def _share(self) -> None:
        if self._shares_tokens and len(self._ids_R):
            self._parallel.share(self._ids_R)

    def _inputs(self, packed: Packed) -> ModelInputs:
        """The inputs on the device, with the tokens that the previous step sampled there."""
        numbers = packed.token_ids_T, packed.follows_T, packed.positions_T, *(group.slots_T for group in packed.tables)
        token_ids_T, follows_T, positions_T, *slots = to_device(np.stack(numbers), self._device)
        if packed.follows_T.max() >= 0:
            token_ids_T = torch.where(follows_T < 0, token_ids_T, self._ids_R[follows_T.clamp(min=0)])
        return ModelInputs(
            token_ids_T=token_ids_T,
            attention=AttentionInputs(
                positions_T=positions_T,
                query_starts=packed.query_starts,
                context_lens=packed.context_lens,
                tables=tuple(
                    GroupTables(slots_T=slots_T, block_tables_SB=to_device(group.tables_SB, self._device))
                    for slots_T, group in zip(slots, packed.tables, strict=True)
                ),
                max_query=packed.max_query,
                max_context=max(packed.context_lens),
            ),
            logit_rows=to_device(packed.logit_rows_R, self._device),
            prompt_lens=packed.prompt_lens,
        )


class Sampling:
    """Finishes a step whose logits are queued: samples rows that need it, and scores prompt targets."""

    def __init__(
        self,
        batch: Batch,
        logits_RV: torch.Tensor,
        latest_R: torch.Tensor | None,
        timed: TimedStep | None = None,
        *,
        grammars: Grammars | None = None,
    ) -> None:
        self._batch = batch
        self._timed = timed
        self._grammars = grammars
        self._failed: dict[int, ErrorInfo | None] = {}
        self._scored: dict[int, TokenScores] = {}
        samples, positions, position = list[Sample](), list[int](), 0
        masks: dict[int, Mask] = {}
        for index, row in enumerate(batch.rows):
            if row.prompt_targets:
                targets_T = to_device(np.array(row.prompt_targets), logits_RV.device)
                nums_top = [row.num_prompt_logprobs] * len(targets_T)
                part_TV = logits_RV[position : position + len(targets_T)]
                self._scored[index] = TokenScores(part_TV, targets_T, nums_top)
                position += len(targets_T)
            if row.sample is not None:
                if row.sample.params.grammar and (mask := self._mask(index, row, row.sample)) is not None:
                    masks[len(samples)] = mask
                samples.append(row.sample)
                positions.append(position)
                position += 1
        if self._scored and samples:
            logits_RV = logits_RV.index_select(0, to_device(np.array(positions), logits_RV.device))
        self.drawn: Drawn | None = sample(logits_RV, samples, latest_R, masks) if samples else None
        self._queued = Queued(logits_RV.device)

    def is_over(self) -> bool:
        return self._queued.is_over()

    def fetch(self) -> StepOutput:
        """The step's output. It waits also for a step that samples nothing: the step's duration is measured, and its KV
        must be complete."""
        self._queued.wait()
        drawn = iter(self.drawn.fetch() if self.drawn is not None else ())
        rows = [next(drawn) if row.sample is not None else RowOutput() for row in self._batch.rows]
        for index, error in self._failed.items():
            rows[index] = replace(rows[index], error=error, token_ids=(), logprobs=())
        for index, scores in self._scored.items():
            rows[index] = _with_prompt(rows[index], scores.fetch())
        return StepOutput(rows=tuple(rows))

    def _mask(self, index: int, row: Row, sample: Sample) -> Mask | None:
        """A row's mask; None if its answer cannot continue, or not yet. Such a row is sampled with the others, and
        reported."""
        assert self._grammars is not None, "a grammar passed an engine that has none"
        try:
            mask = self._grammars.allowed(row.request_id, sample)
            if mask is None:
                self._failed[index] = None
            return mask
        except InvalidRequest as error:
            self._failed[index] = error_info(error)
            return None

    def device_span(self) -> tuple[float, float] | None:
        return self._timed.span() if self._timed is not None else None


def _with_prompt(output: RowOutput, prompt_logprobs: list[Logprobs]) -> RowOutput:
    return replace(output, prompt_logprobs=tuple(prompt_logprobs))
