"""A simulated device: computes the toy model's tokens, and takes the time that the latency model says.

What a block holds is kept position by position, so that a block that was never sent, was given away too early or has
two owners shows as a wrong token (`workers.toy`). A sequence is summed up in full whenever it comes to this device or
comes back; in between only its new positions are added, unless the device is `thorough`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.simulate.latency import Latency, Step, step_of
from kvtransfer.reshard import Cut
from protos.values import KVLayout
from workers.engine.batch import Batch, Row, RowOutput, StepOutput
from workers.toy import summed_token

WEIGHT = 7
_NOTHING = RowOutput()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A copy of some blocks on its way; `nbytes` is what real ones would weigh."""

    content: Any  # int64 [units, positions of a unit]
    nbytes: int


@dataclass(slots=True)
class Tally:
    """What a device has done: a step's time is shared out by tokens between prompts and answers."""

    prompt_s: float = 0.0
    answer_s: float = 0.0
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0

    @property
    def busy_s(self) -> float:
        return self.prompt_s + self.answer_s

    def count(self, step: Step, num_answer: int, step_s: float) -> None:
        num_prompt = step.num_tokens - num_answer
        self.num_answer_tokens += num_answer
        self.num_prompt_tokens += num_prompt
        self.answer_s += step_s * num_answer / step.num_tokens
        self.prompt_s += step_s * num_prompt / step.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step under way: over at `end_s`, which is when `fetch` lets its engine go on."""

    device: Device
    output: StepOutput
    end_s: float

    def fetch(self) -> StepOutput:
        self.device.now_s = max(self.device.now_s, self.end_s)
        return self.output


class Device:
    """The pipeline of one engine (`workers.engine.batch.Pipeline`) and its KV cache (`workers.kv.mover.Blocks`).

    `now_s` is the engine's own time: set before each of its turns, moved on by what it waits for. `slowness`
    multiplies the time of steps that begin from now on.
    """

    def __init__(
        self,
        latency: Latency,
        *,
        layout: KVLayout,
        num_blocks: int,
        vocab_size: int,
        thorough: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.slowness = 1.0
        self.tally = Tally()
        self.last = Batch(rows=())
        self.last_s = 0.0
        self._latency = latency
        self._layout = layout
        self._block_size = layout.block_size
        self._vocab_size = vocab_size
        self._thorough = thorough
        self._free_s = 0.0
        self._output = StepOutput(rows=())
        self._content = np.zeros((num_blocks, layout.block_size), dtype=np.int64)
        self._sums = [0] * num_blocks
        self._totals: dict[str, tuple[int, int]] = {}  # request -> (positions, their sum) of the last batch

    # -- a pipeline ----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Launched:
        """Begins when the step before it is over."""
        sizes = [(len(row.token_ids) + (row.follows is not None), row.start) for row in batch.rows]
        step = step_of([(num, start + num) for num, start in sizes])
        step_s = self._latency.step_s(step) * self.slowness
        self._free_s = max(self._free_s, self.now_s) + step_s
        self.tally.count(step, sum([num == 1 for num, _ in sizes]), step_s)
        self.last, self.last_s = batch, step_s
        self._output = self._compute(batch)
        return Launched(device=self, output=self._output, end_s=self._free_s)

    def clock(self) -> float:
        return self.now_s

    def _compute(self, batch: Batch) -> StepOutput:
        """All rows write before any reads. A sequence that only went on by a token need not be read again."""
        rows = batch.rows
        added = [self._write(row, self._tokens(row)) for row in rows]
        totals: dict[str, tuple[int, int]] = {}
        outputs = []
        for row, value in zip(rows, added, strict=True):
            if row.sample is None:
                outputs.append(_NOTHING)
                continue
            known = self._totals.get(row.request_id)
            if value is None or known is None or known[0] != row.start or self._thorough:
                stop = row.stop
                total = self._total(row.block_ids, stop)
            else:
                stop, total = known[0] + 1, known[1] + value
            totals[row.request_id] = (stop, total)
            token_id = summed_token(total, weight=WEIGHT, vocab_size=self._vocab_size, sample=row.sample)
            outputs.append(RowOutput(token_id=token_id))
        self._totals = totals
        return StepOutput(rows=tuple(outputs))

    def _tokens(self, row: Row) -> Sequence[int]:
        """With the one that the step before this has sampled."""
        if row.follows is None:
            return row.token_ids
        token_id = self._output.rows[row.follows].token_id
        assert token_id is not None, f"request {row.request_id} follows a row that sampled nothing"
        return (*row.token_ids, token_id)

    # -- what blocks hold ----------------------------------------------------------------------------------------------

    def read(self, cut: Cut, stage: Callable[[int], object]) -> Payload:
        """A copy of whole blocks, whatever part of them is asked for: positions have no layers and no heads here."""
        content = self._content[list(cut.block_ids)].reshape(-1, cut.unit)
        share = len(cut.layers) / self._layout.num_layers * cut.unit / self._layout.block_size
        return Payload(
            content=content[np.minimum(cut.units, len(content) - 1)],
            nbytes=int(len(cut.units) * share * self._layout.block_bytes),
        )

    def write(self, cut: Cut, payload: Payload) -> None:
        ids = list(cut.block_ids)
        content = payload.content.reshape(len(ids), self._block_size)
        self._content[ids] = content
        for block_id, total in zip(ids, content.sum(axis=1).tolist(), strict=True):
            self._sums[block_id] = total

    def _write(self, row: Row, token_ids: Sequence[int]) -> int | None:
        """What was written, if it is one position. A block that is begun anew loses what an earlier owner left."""
        size, start = self._block_size, row.start
        if len(token_ids) == 1:
            block_id, offset = row.block_ids[start // size], start % size
            value = (start + 1) * ((token_ids[0] + 1) * 7919 + start)
            if offset == 0:
                self._content[block_id] = 0
                self._sums[block_id] = value
            else:
                self._sums[block_id] += value - int(self._content[block_id, offset])
            self._content[block_id, offset] = value
            return value
        values = weighed(token_ids, start)
        first, stop = start // size, start + len(token_ids)
        for index in range(first, -(-stop // size)):
            low, high = max(start, index * size), min(stop, (index + 1) * size)
            block_id = row.block_ids[index]
            if low == index * size:
                self._content[block_id] = 0
            self._content[block_id, low - index * size : high - index * size] = values[low - start : high - start]
            self._sums[block_id] = int(self._content[block_id].sum())
        return None

    def _total(self, block_ids: Sequence[int], stop: int) -> int:
        """Of positions [0, stop): all full blocks', and the beginning of the last."""
        full, rest = divmod(stop, self._block_size)
        total = sum([self._sums[block_id] for block_id in block_ids[:full]])
        return total + (int(self._content[block_ids[full], :rest].sum()) if rest else 0)


def weighed(token_ids: Sequence[int], start: int) -> Any:
    """What `workers.toy` adds up for these tokens at positions from `start` on: (i + 1) * kv[i], int64."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int64)
    return (positions + 1) * ((np.array(token_ids, dtype=np.int64) + 1) * 7919 + positions)
