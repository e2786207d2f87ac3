"""What the scheduler hands to a runner for one step, and what comes back. Values only: no torch, no engine state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protos.values import Logprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How to choose the token after a row's last position.

    `index` counts the output tokens before it: with the seed it is all the randomness there is. `prompt_ids` and
    `output_ids` are filled in only when a penalty is asked for (they are what penalties count), and so is
    `banned_ids`: ids that must not be chosen yet (end-of-sequence and stop ids while `min_tokens` is not reached).
    """

    params: SamplingParams
    index: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Positions [start, start + len(token_ids)) of one sequence. `block_ids` covers all positions up to the last.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step. Rows that continue a prompt and rows that decode one token are mixed; rows are in scheduling order."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutput:
    """`token_id` is None where the row had nothing to sample; `logprobs` None where none were asked for."""

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One `RowOutput` per row of the batch, in its order."""

    rows: tuple[RowOutput, ...]


class Runner(Protocol):
    """Computes a step: forward pass, then sampling. Called from the engine's thread only, one batch at a time.

    The KV of every position in the batch is in its block when `run` returns. Raises only for faults of the machine
    (out of memory, a lost rank): then the engine is lost with it.
    """

    def run(self, batch: Batch) -> StepOutput: ...
