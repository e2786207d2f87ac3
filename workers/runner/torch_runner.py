"""Runs batches on a model: one forward pass, then sampling on rank 0. On a GPU `launch` queues all of it and returns.

    launch n      pack ── pinned, queued ──▶ forward ──▶ sample ──▶ ids ── queued ──▶ pinned ── fetch n
    launch n + 1  pack ────────────────────▶ forward  ◀── tokens that follow ──┘

CPU and CUDA share every line. Legend: T tokens of the batch (rows packed), R positions with logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protos.errors import InvalidRequest
from protos.values import MAX_DRAFTS, ErrorInfo, Logprobs, SamplingParams
from protos.wire import error_info
from workers.adapters.low_rank import AdapterTokens
from workers.attention.backend import AttentionBackend
from workers.attention.cpu import has_same_bits
from workers.attention.grouped_attention import WatchedAttention
from workers.batch import (
    Batch,
    CompletedStep,
    PendingStep,
    Row,
    RowLimits,
    RowOutput,
    Sample,
    StepOutput,
    is_penalised,
)
from workers.grammar.grammar_seam import Grammars, Mask
from workers.kernels.this_device import Queued, to_device
from workers.models.decoder import ModelInputs, Taps
from workers.models.interface import ServedDecoder
from workers.runner.cuda_graphs import DecodeGraphs, Recorder
from workers.runner.fused_layers import fused_layers
from workers.runner.inputs import model_inputs
from workers.runner.packed_batch import Packed, num_pooled, num_sampled, pack, sampled_rows
from workers.runner.padding import padded, warming_steps
from workers.sampling.draft_verification import drafted_samples, verified
from workers.sampling.penalties import NONE
from workers.sampling.sampler import Drawn, sample
from workers.sampling.token_scores import TokenScores
from workers.timeline import Timeline

FORGET_S = 30.0
"""After this long the two clocks are aligned again: their rates differ slightly."""

_cuda: Any = torch.cuda


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


class DeviceClock:
    """Times work in a device's queue. `clock` is the host's clock; `event` makes a marker for the queue, such as
    torch's CUDA events."""

    def __init__(self, clock: Callable[[], float], *, event: Callable[[], Any] = _event) -> None:
        self._clock = clock
        self._event = event
        self._base: Any = None
        self._base_s = 0.0

    def begin(self) -> TimedStep:
        if self._base is None or self._clock() - self._base_s > FORGET_S:
            self._base = self._event()
            self._base.record()
            self._base.synchronize()
            self._base_s = self._clock()
        start, end = self._event(), self._event()
        start.record()
        return TimedStep(self._base, self._base_s, start, end)


class TimedStep:
    def __init__(self, base: Any, base_s: float, start: Any, end: Any) -> None:
        self._base = base
        self._base_s = base_s
        self._start = start
        self._end = end

    def stop(self) -> None:
        """Marks the end of work queued since."""
        self._end.record()

    def span(self) -> tuple[float, float]:
        """(start, end) by the host's clock. Waits for the step's end."""
        self._end.synchronize()
        milliseconds = (self._base.elapsed_time(event) for event in (self._start, self._end))
        start_s, end_s = (self._base_s + ms / 1000 for ms in milliseconds)
        return start_s, end_s


class TorchRunner:
    """One rank's runner: a pipeline. All ranks must launch the same batches; only rank 0 samples.

    `shares_tokens` sends sampled ids to the other ranks, for rows that depend on them: needed with steps in flight.
    `grammars` make masks for rows with a grammar, while the device computes the logits.
    """

    def __init__(
        self,
        decoder: ServedDecoder,
        attention: AttentionBackend,
        *,
        block_size: int,
        shares_tokens: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = WatchedAttention(attention)
        self._splits_drafts = not has_same_bits(attention)
        self._through = fused_layers(decoder, attention, self._attention.notify)
        self._block_size = block_size
        self.grammars = grammars
        self._device = decoder.context.device
        self._parallel = decoder.context.parallel
        self._shares_tokens = shares_tokens and self._parallel.size > 1
        self._sampled: Mapping[int, int] = {}
        self._ids_R = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._timeline = Timeline(time.monotonic)
        self._device_clock: DeviceClock | None = None
        self.graphs: DecodeGraphs | None = None
        self._taps = Taps()

    @property
    def row_limits(self) -> RowLimits:
        return RowLimits(num_drafts=MAX_DRAFTS)

    def run(self, batch: Batch) -> StepOutput:
        """Runs one step by itself. Raises as `launch` does."""
        return self.launch(batch).fetch()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Launches a step. Raises WorkerLost if a rank has ended, and torch's own error if memory runs out."""
        timed = self._device_clock.begin() if self._device_clock is not None and self._timeline.recording else None
        packed = pack(batch, block_size=self._block_size, sampled=self._sampled, splits_drafts=self._splits_drafts)
        latest_R = self._latest(batch)
        self._sampled = sampled_rows(batch)
        with self._timeline.span("forward", batch):
            logits_RV, hidden_PE = self._forward(packed)
        if self._parallel.rank:
            self._ids_R = torch.zeros(num_sampled(batch), dtype=torch.int64, device=self._device)
            self._share()
            return CompletedStep(output=StepOutput(rows=()))
        with self._timeline.span("sample", batch):
            step = Sampling(batch, logits_RV, latest_R, timed, grammars=self.grammars, hidden_PE=hidden_PE)
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

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Keeps what enters these layers in every step from now on (`HiddenStates`). No step may be captured then."""
        assert self.graphs is None, "captured steps keep no hidden states"
        self._taps = Taps(layers)

    @property
    def keeps_hidden(self) -> bool:
        return bool(self._taps.layers)

    def at(self, layer: int) -> torch.Tensor:
        """[T, E]: as `workers.speculation.proposer.HiddenStates`."""
        return self._taps.states[layer]

    @torch.inference_mode()
    def warm(self, *, max_tokens: int, max_rows: int, num_groups: int = 1) -> None:
        """Runs steps of padding that launch every kernel at each of its tiles, so that none is compiled while requests
        wait. Call it on all ranks at the same time, before `capture`."""
        draws = Sample(params=SamplingParams(temperature=1.0), index=0)
        for packed in warming_steps(max_tokens, max_rows, block_size=self._block_size, num_groups=num_groups):
            logits_RV, _ = self._forward(packed)
            if not self._parallel.rank:
                sample(logits_RV[:1], (draws,))

    def capture(self, recorder: Recorder, *, max_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        """Captures decode-only steps, which are replayed from now on. Call it once, on all ranks at the same time."""
        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "num_groups": num_groups}
        self.graphs = DecodeGraphs(self._decoder, self._attention, recorder, **sizes)
        self.graphs.capture(self._inputs)

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues the forward pass. Returns the logits [R, V], and the pooled hidden states [P, E] if there are any."""
        pools = bool(len(packed.pooled_rows_P))
        recorded = self.graphs is not None and not pools and not packed.adapters
        size = self.graphs.size_for(packed) if self.graphs is not None and recorded else None
        if self.graphs is None or size is None:
            inputs = self._inputs(packed)
            self._attention.begin(inputs.attention)
            logits_RV = self._decoder.forward(inputs, self._attention, self._through)
            return logits_RV, inputs.hidden[0] if pools else None
        logits_RV = self.graphs.replay(self._inputs(padded(packed, size)), size)[: len(packed.logit_rows_R)]
        self._attention.notify(self._decoder.config.num_layers - 1)
        return logits_RV, None

    def _latest(self, batch: Batch) -> torch.Tensor | None:
        """The token before each one to be sampled, if penalties must count it and the host lacks it."""
        places = [
            self._sampled[row.depends_on_row]
            if row.depends_on_row is not None and is_penalised(row.sample.params)
            else NONE
            for row in batch.rows
            if row.sample is not None
            for _ in range(1 + len(row.draft_ids))
        ]
        if not any(place != NONE for place in places):
            return None
        places_R = to_device(np.array(places), self._device)
        return torch.where(places_R < 0, NONE, self._ids_R[places_R.clamp(min=0)])

    def _share(self) -> None:
        if self._shares_tokens and len(self._ids_R):
            self._parallel.share(self._ids_R)

    def _inputs(self, packed: Packed) -> ModelInputs:
        inputs = model_inputs(packed, self._device, self._ids_R, self._taps)
        if packed.adapters:
            inputs = replace(inputs, adapters=tuple([self._tokens_of(*adapter) for adapter in packed.adapters]))
        return inputs

    def _tokens_of(self, adapter_id: str, places_T: NDArray[np.int64] | None) -> AdapterTokens:
        on_device = None if places_T is None else to_device(places_T, self._device)
        return AdapterTokens(adapter_id=adapter_id, places_T=on_device)


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
        hidden_PE: torch.Tensor | None = None,
    ) -> None:
        self._batch = batch
        self._pooled = _sums(batch, hidden_PE) if hidden_PE is not None else {}
        self._timed = timed
        self._grammars = grammars
        self._failed: dict[int, ErrorInfo | None] = {}
        self._scored: dict[int, TokenScores] = {}
        self._lengths: dict[int, int] = {}  # drafts of a row whose masks are known
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
                if row.sample.params.grammar:
                    masks.update(enumerate(self._masks(index, row, row.sample), len(samples)))
                samples += drafted_samples(row.sample, row.draft_ids) if row.draft_ids else (row.sample,)
                positions += range(position, position + 1 + len(row.draft_ids))
                position += 1 + len(row.draft_ids)
        if self._scored and samples:
            logits_RV = logits_RV.index_select(0, to_device(np.array(positions), logits_RV.device))
        self.drawn: Drawn | None = sample(logits_RV, samples, latest_R, masks) if samples else None
        self._queued = Queued(logits_RV.device)

    def is_over(self) -> bool:
        return self._queued.is_over()

    def fetch(self) -> StepOutput:
        """Returns the step's output. Also waits for a step without samples: its duration is measured, and its KV must
        be complete."""
        self._queued.wait()
        drawn = iter(self.drawn.fetch() if self.drawn is not None else ())
        rows = [
            RowOutput()
            if row.sample is None
            else next(drawn)
            if not row.draft_ids
            else verified(
                [next(drawn) for _ in range(1 + len(row.draft_ids))], row.draft_ids[: self._lengths.get(index)]
            )
            for index, row in enumerate(self._batch.rows)
        ]
        for index, error in self._failed.items():
            rows[index] = replace(rows[index], error=error, token_ids=(), logprobs=())
        for index, scores in self._scored.items():
            rows[index] = _with_prompt(rows[index], scores.fetch())
        for index, sum_E in self._pooled.items():
            rows[index] = replace(rows[index], embedding=sum_E.cpu().numpy().tobytes())
        return StepOutput(rows=tuple(rows))

    def _masks(self, index: int, row: Row, sample: Sample) -> Sequence[Mask]:
        """A row's masks: of its next token, and after each draft up to the first that its grammar forbids. None if its
        answer cannot continue, or its masks are pending: the row is sampled with the others, and reported."""
        assert self._grammars is not None, "a grammar passed an engine that has none"
        try:
            mask = self._grammars.allowed(row.request_id, sample)
        except InvalidRequest as error:
            self._failed[index] = error_info(error)
            return ()
        if mask is None:
            self._failed[index] = None
            return ()
        if not row.draft_ids:
            return (mask,)
        further = self._grammars.allowed_after(row.request_id, drafted_samples(sample, row.draft_ids))
        self._lengths[index] = len(further)
        return (mask, *further)

    def device_span(self) -> tuple[float, float] | None:
        return self._timed.span() if self._timed is not None else None


def _sums(batch: Batch, hidden_PE: torch.Tensor) -> dict[int, torch.Tensor]:
    """The float32 sum of hidden states of each pooled row."""
    sums, position = dict[int, torch.Tensor](), 0
    for index, row in enumerate(batch.rows):
        if number := num_pooled(row):
            sums[index] = hidden_PE[position : position + number].float().sum(0)
            position += number
    return sums


def _with_prompt(output: RowOutput, prompt_logprobs: list[Logprobs]) -> RowOutput:
    return replace(output, prompt_logprobs=tuple(prompt_logprobs))
