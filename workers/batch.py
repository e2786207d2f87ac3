"""What the scheduler hands to a runner for one step, and what comes back. Values only: no torch, no engine state.

The seam to the device has two shapes, and an engine takes either (`pipeline`)::

    Runner     run(batch) ──▶ StepOutput                               computes the step before it returns
    Pipeline   launch(batch) ──▶ Pending ── fetch() ──▶ StepOutput     begins it; the host goes on meanwhile

Steps are launched, computed and fetched in one order. An engine of depth d launches step n before it has fetched step
n - d: the tokens that n - d samples are then not known when n is planned, and go from the one to the other on the
device (`Row.follows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from protos.value import Value
from protos.values import ErrorInfo, Logprobs, SamplingParams


class Sample(Value, frozen=True, kw_only=True):
    """How to choose the token after a row's last position.

    `index` counts the output tokens before it: with the seed it is all the randomness there is. `prompt_ids` and
    `output_ids` are filled in only when a penalty is asked for (they are what penalties count); where the row follows
    another, one more output token counts, which nobody knows yet. Under a grammar `output_ids` are filled in as well,
    and all of them: such a row follows no other. `banned_ids` must not be chosen yet: end-of-sequence and stop ids
    while `min_tokens` is not reached.
    """

    params: SamplingParams
    index: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()


def is_penalised(params: SamplingParams) -> bool:
    """Do the tokens so far change the next one's logits?"""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


class Row(Value, frozen=True, kw_only=True):
    """Positions [start, stop) of one sequence. `block_ids` covers all positions up to the last.

    `token_ids` are the tokens there; if the last one is not known yet it is not among them, and `follows` says which
    row of the batch before this one samples it.

    `sample` is None for a chunk that does not reach the end of what is known. `prompt_targets` asks for prompt
    logprobs: entry i is the prompt token that follows position start + i; empty when not asked for. It may be one
    shorter than `token_ids`, at the prompt's end. `num_prompt_logprobs` is how many of the most likely to report.
    `prompt_len` is the length of the sequence's whole prompt: dynamic and longrope rope scalings depend on it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sample: Sample | None = None
    prompt_targets: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    prompt_len: int = 0
    follows: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.follows is not None)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids) + (self.follows is not None)  # asked of every row, several times a step


class Batch(Value, frozen=True, kw_only=True):
    """One step. Rows that continue a prompt and rows that decode one token are mixed; rows are in scheduling order."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def reads_prompts(self) -> bool:
        return any(row.num_tokens > 1 for row in self.rows)

    @property
    def num_read(self) -> int:
        """Positions of KV, each once a row."""
        return sum(row.stop for row in self.rows)

    @property
    def num_attended(self) -> int:
        """Pairs of a computed position and one it looks at, with no window."""
        return sum(row.num_tokens * (row.start + row.stop + 1) // 2 for row in self.rows)


class RowOutput(Value, frozen=True, kw_only=True):
    """`token_id` is None where the row had nothing to sample; `logprobs` None where none were asked for. With an
    `error` the request cannot go on, for a reason of its own; `token_id` means nothing then. Nor does it where the row
    was `late`: nothing is known yet of what its grammar allows, and its last position is to be computed again."""

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    error: ErrorInfo | None = None
    late: bool = False


class StepOutput(Value, frozen=True, kw_only=True):
    """One `RowOutput` per row of the batch, in its order."""

    rows: tuple[RowOutput, ...]


class Runner(Protocol):
    """Computes a step: forward pass, then sampling. Called from the engine's thread only, one batch at a time.

    The KV of every position in the batch is in its block when `run` returns. Raises only for faults of the machine
    (out of memory, a lost rank): then the engine is lost with it.
    """

    def run(self, batch: Batch) -> StepOutput: ...


class Pending(Protocol):
    """A step under way."""

    def fetch(self) -> StepOutput:
        """Waits for the step's end. Called once, from the engine's thread, in the order of the launches. Raises what
        `Runner.run` raises."""
        ...


@runtime_checkable
class Awaited(Protocol):
    """A step under way on a device that computes by itself."""

    def is_over(self) -> bool:
        """Would `fetch` return at once?"""
        ...


@runtime_checkable
class Timed(Protocol):
    """A step under way whose device keeps time itself."""

    def device_span(self) -> tuple[float, float] | None:
        """After `fetch`: when the device began and ended it, by the timeline's clock; None if nobody recorded then."""
        ...


@runtime_checkable
class Pipeline(Protocol):
    """Computes steps one after the other, in the order they were launched, while the host prepares the next one.

    A step sees all that the steps before it wrote into the cache, and so does whoever reads or writes blocks between
    two launches. Raises as `Runner.run` does, here or when the step is fetched.
    """

    def launch(self, batch: Batch) -> Pending: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """What steps that are all alike have brought: `tokens` of each row of the `batch`, which is the last one launched,
    and is `pending` since `launched_s` where a step was in flight before them. `steps_s`: how long each took."""

    batch: Batch
    tokens: Sequence[tuple[int, ...]]
    steps_s: Sequence[float]
    pending: Pending | None = None
    launched_s: float = 0.0


@runtime_checkable
class Repeating(Protocol):
    """A pipeline that goes on by itself with a batch in which every row decodes."""

    def repeat(self, num_steps: int, *, in_flight: bool, taken: Mapping[str, int]) -> Repeated:
        """Launches the last batch so many times more, each row one position on, and fetches as many steps: those
        before the last one if there is one `in_flight`. The last of them begins the blocks `taken` by some requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that was over when its launch returned."""

    output: StepOutput

    def fetch(self) -> StepOutput:
        return self.output


class InTurn:
    """A runner as a pipeline: each step is computed within its launch, so any depth is right and none is faster."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last = StepOutput(rows=())

    def launch(self, batch: Batch) -> Done:
        self._last = self._runner.run(followed(batch, self._last))
        return Done(output=self._last)


def pipeline(runner: Runner | Pipeline) -> Pipeline:
    return runner if isinstance(runner, Pipeline) else InTurn(runner)


def followed(batch: Batch, last: StepOutput) -> Batch:
    """The batch with every token known, once the step before it is over: no row follows another."""
    return Batch(rows=tuple(_followed(row, last) for row in batch.rows))


def _followed(row: Row, last: StepOutput) -> Row:
    if row.follows is None:
        return row
    token_id = last.rows[row.follows].token_id
    assert token_id is not None, f"request {row.request_id} follows a row that sampled nothing"
    sample = row.sample
    if sample is not None and is_penalised(sample.params):
        sample = replace(sample, output_ids=(*sample.output_ids, token_id))
    return replace(row, token_ids=(*row.token_ids, token_id), sample=sample, follows=None)
