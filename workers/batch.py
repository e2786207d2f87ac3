"""The seam between scheduler and runner: a batch for one step out, a step's output back. Values only: no torch, no
engine state.

    launch(batch) ──▶ PendingStep ── fetch() ──▶ StepOutput    the host continues meanwhile

Steps are launched, computed and fetched in one order. An engine of depth d launches step n before it has fetched step
n - d: the tokens that n - d samples are then unknown when n is planned, and step n reads them on the device
(`Row.depends_on_row`).

A row that samples brings one token, or several (`RowOutput.token_ids`; `RowLimits` says what a pipeline computes)::

    one more token each    draft_ids   their positions are computed in the same step, and each is verified: the row
                                       brings the drafts up to the first rejected one, and one token after them
    a step each            num_steps   the device decodes so many times, each time from the token before: a batch that
                                       has been launched is prolonged (`ProlongableStep`)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from protos.codec import Value
from protos.values import ErrorInfo, Logprobs, SamplingParams

MEAN = "mean"
"""The `pooling` of all positions; the other one is of the last."""


class Sample(Value, frozen=True, kw_only=True):
    """How to choose the token after a row's last position.

    `index` counts the output tokens before it: with the seed it is all the randomness there is. `prompt_ids` and
    `output_ids` are filled in only for a penalty, which counts them; where the row depends on another one, the token
    that this samples counts, too. Under a grammar `output_ids` has all output tokens: such a row depends on no other.
    `banned_ids` must not be chosen: end-of-sequence and stop ids until there are `min_tokens`.
    """

    params: SamplingParams
    index: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()


def is_penalised(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


class Row(Value, frozen=True, kw_only=True):
    """Positions [start, stop) of one sequence. `block_tables` has the sequence's blocks in each group of the KV layout
    (`protos.values.KVGroup`); each table covers all positions that the step writes.

    `token_ids` are the tokens there, without the last one where that is still being sampled: `depends_on_row` is the
    row of the batch before that samples it. `draft_ids` stand after them, at the last positions: proposed tokens,
    which the step verifies.

    `sample` is None for a chunk that does not reach the end of what is known. `prompt_targets` asks for prompt
    logprobs: entry i is the prompt token that follows position start + i; empty when not asked for. It may be one
    shorter than `token_ids`, at the prompt's end. `num_prompt_logprobs` is how many of the most likely to report.
    `pooling`: the vector of these positions is wanted, as in `SamplingParams`; of "last" only where the row samples.
    `prompt_len` is the length of the sequence's whole prompt: dynamic and longrope rope scalings depend on it.
    `adapter` is the id of the LoRA adapter that changes the model for this row; "": none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    sample: Sample | None = None
    prompt_targets: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    prompt_len: int = 0
    depends_on_row: int | None = None
    draft_ids: tuple[int, ...] = ()
    pooling: str = ""
    adapter: str = ""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The only block table, for a model with one group of layers."""
        (block_ids,) = self.block_tables
        return block_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.depends_on_row is not None) + len(self.draft_ids)

    @property
    def stop(self) -> int:
        return (
            self.start + len(self.token_ids) + (self.depends_on_row is not None) + len(self.draft_ids)
        )  # no calls: hot

    @property
    def is_decode(self) -> bool:
        return len(self.token_ids) + (self.depends_on_row is not None) == 1


class Batch(Value, frozen=True, kw_only=True):
    """One step. Rows that continue a prompt and rows that decode are mixed; rows are in scheduling order. With several
    `num_steps` all rows decode, without drafts."""

    rows: tuple[Row, ...]
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows) * self.num_steps

    @property
    def has_prefill(self) -> bool:
        return not all(row.is_decode for row in self.rows)

    @property
    def num_read(self) -> int:
        return sum(row.stop for row in self.rows)

    @property
    def num_attended(self) -> int:
        """Counts pairs of a computed position and a position to which it attends, without windows."""
        return sum(row.num_tokens * (row.start + row.stop + 1) // 2 for row in self.rows)


class RowOutput(Value, frozen=True, kw_only=True):
    """`token_ids` are the sampled tokens; none if the row does not sample, or its grammar's mask is pending: then its
    last position is computed again. `logprobs` has an entry a token, or none where none were asked for. `embedding` is
    the sum over the row's pooled positions, float32. With an `error` the request cannot continue, for a reason of its
    own."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    error: ErrorInfo | None = None
    embedding: bytes = b""


class StepOutput(Value, frozen=True, kw_only=True):
    """The output of a step: one `RowOutput` per row of the batch, in its order. For a batch of several steps, `ends_s`
    has the end of each step by the engine's clock."""

    rows: tuple[RowOutput, ...]
    ends_s: tuple[float, ...] = ()


class PendingStep(Protocol):
    def fetch(self) -> StepOutput:
        """Waits for the step's end. Called once, from the engine's thread, in the order of the launches. Raises only
        for faults of the machine (out of memory, a lost rank): then the engine is lost with it."""
        ...


@runtime_checkable
class PollableStep(Protocol):
    """A pending step of a device that computes by itself."""

    def is_over(self) -> bool: ...


@runtime_checkable
class ProlongableStep(Protocol):
    """A pending step of a pipeline that takes several steps at once."""

    def prolong(self, batch: Batch) -> PendingStep:
        """Extends the batch that was launched last. `batch` has more `num_steps` than the launched one."""
        ...


@runtime_checkable
class DeviceTimedStep(Protocol):
    """A pending step whose device keeps time itself."""

    def device_span(self) -> tuple[float, float] | None:
        """Returns when the device began and ended the step, by the timeline's clock; None if it was not recorded. Call
        it after `fetch`."""
        ...


class RowLimits(Value, frozen=True, kw_only=True):
    """The most steps (`Batch.num_steps`) and drafts of a row (`Row.draft_ids`) that a pipeline or runner computes. By
    default rows bring one token each."""

    num_steps: int = 1
    num_drafts: int = 0


class Pipeline(Protocol):
    """Computes steps, forward pass and then sampling, one after the other in the order they were launched, while the
    host prepares the next one. Called from the engine's thread only.

    A step sees all that the steps before it wrote into the cache, and so does code that reads or writes blocks between
    two launches. Raises as `PendingStep.fetch` does, here or when the step is fetched.
    """

    @property
    def row_limits(self) -> RowLimits: ...

    def launch(self, batch: Batch) -> PendingStep: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedStep:
    """A step that was over when its launch returned."""

    output: StepOutput

    def fetch(self) -> StepOutput:
        return self.output
