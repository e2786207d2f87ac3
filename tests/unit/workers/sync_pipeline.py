"""A runner that computes a whole step at once, as a pipeline."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from workers.batch import Batch, CompletedStep, Row, RowLimits, StepOutput, is_penalised


class Runner(Protocol):
    """The KV of every position in the batch is in its block when `run` returns."""

    def run(self, batch: Batch) -> StepOutput: ...


class SyncPipeline:
    """Each step is computed within its launch, so any depth is right and none is faster."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last = StepOutput(rows=())

    @property
    def row_limits(self) -> RowLimits:
        limits: RowLimits = getattr(self._runner, "row_limits", RowLimits())
        return limits

    def launch(self, batch: Batch) -> CompletedStep:
        self._last = self._runner.run(resolved(batch, self._last))
        return CompletedStep(output=self._last)


def resolved(batch: Batch, last: StepOutput) -> Batch:
    """The batch with every token known, once the step before it is over: no row depends on another."""
    return Batch(rows=tuple(_resolved(row, last) for row in batch.rows), num_steps=batch.num_steps)


def _resolved(row: Row, last: StepOutput) -> Row:
    if row.depends_on_row is None:
        return row
    token_ids = last.rows[row.depends_on_row].token_ids
    assert token_ids, f"request {row.request_id} depends on a row that sampled nothing"
    sample = row.sample
    if sample is not None and is_penalised(sample.params):
        sample = replace(sample, output_ids=(*sample.output_ids, *token_ids))
    return replace(row, token_ids=(*row.token_ids, token_ids[-1]), sample=sample, depends_on_row=None)
