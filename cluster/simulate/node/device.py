"""A simulated device: computes the toy model's tokens, and takes the time that the latency model says.

What a block holds is kept position by position, so that a block that was never sent, was given away too early or has
two owners shows as a wrong token (`workers.toy`). A sequence is summed up in full whenever it comes to this device or
comes back; in between only its new positions are added, unless the device is `thorough`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import pack
from typing import Any

import numpy as np

from cluster.simulate.latency.base import Chance, Latency, Step, step_of
from kvtransfer.reshard import Cut
from protos.values import KVLayout, Logprobs, TokenLogprob
from workers.batch import Batch, Repeated, Row, RowOutput, Sample, StepOutput
from workers.toy import MODULUS, STRIDE, summed_token

WEIGHT = 7
_NOTHING = RowOutput()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A copy of some blocks on its way; `nbytes` is what real ones would weigh, `sums` are the blocks' own."""

    content: Any  # uint16 [units, positions of a unit]
    nbytes: int
    sums: Sequence[int]


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
        num_prompt = int(step.num_tokens) - num_answer
        self.num_answer_tokens += num_answer
        self.num_prompt_tokens += num_prompt
        self.answer_s += step_s * num_answer / step.num_tokens
        self.prompt_s += step_s * num_prompt / step.num_tokens

    def count_plain(self, num_rows: int, steps_s: Sequence[float]) -> None:
        """Steps that make a token for each of so many answers."""
        self.num_answer_tokens += num_rows * len(steps_s)
        for step_s in steps_s:
            self.answer_s += step_s * num_rows / num_rows  # to the last bit what `count` adds


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
    """The pipeline of one engine (`workers.batch.Pipeline`) and its KV cache (`workers.transfer.mover.Blocks`).

    `now_s` is the engine's own time: set before each of its turns, moved on by what it waits for. `slowness`
    multiplies the time of steps that begin from now on, `chance` changes that of each. A `thorough` device keeps in
    `began` the position that was computed first, by request.
    """

    def __init__(
        self,
        latency: Latency,
        *,
        layout: KVLayout,
        num_blocks: int,
        vocab_size: int,
        thorough: bool = False,
        chance: Chance | None = None,
    ) -> None:
        self.now_s = 0.0
        self.slowness = 1.0
        self.tally = Tally()
        self.began: dict[str, int] = {}
        self.last = Batch(rows=())
        self.last_s = 0.0
        self.before_s = 0.0  # of the step before it, which may be under way still
        self._latency = latency
        self._layout = layout
        self._block_size = layout.block_size
        self._vocab_size = vocab_size
        self._thorough = thorough
        self._chance = chance
        self._num_launched = 0
        self._free_s = 0.0
        self._output = StepOutput(rows=())
        self._content = np.zeros((num_blocks, layout.block_size), dtype=np.uint16)  # modulo `MODULUS`, as tokens are
        self._flat = self._content.data.cast("B").cast("H")  # the same, quicker for a few positions
        self._sums = array("q", bytes(8 * num_blocks))  # over a block's positions
        self._steps_s: list[float] = []  # foreseen
        self._frees_s: list[float] = []
        self._totals: dict[str, tuple[int, int]] = {}  # request -> (positions, their sum) of the last batch

    # -- a pipeline ----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Launched:
        """Begins when the step before it is over."""
        sizes = [(len(row.token_ids) + (row.follows is not None), row.start) for row in batch.rows]
        step = step_of([(num, start + num) for num, start in sizes])
        step_s = self._latency.step_s(step) * self.slowness
        if self._chance is not None:
            step_s = self._chance.step_s(self._num_launched, step_s)
        self._num_launched += 1
        self._free_s = max(self._free_s, self.now_s) + step_s
        self.tally.count(step, sum([num == 1 for num, _ in sizes]), step_s)
        self.last, self.before_s, self.last_s = batch, self.last_s, step_s
        self._output = self._compute(batch)
        return Launched(device=self, output=self._output, end_s=self._free_s)

    def clock(self) -> float:
        return self.now_s

    # -- steps that are all alike --------------------------------------------------------------------------------------

    def foresee(self, num_steps: int, *, in_flight: bool) -> list[float]:
        """When so many more steps would be over, counted from the one `in_flight` if there is one."""
        rows = self.last.rows
        num_rows, read = len(rows), sum([stop for stop, _ in self._totals.values()])  # each of them sampled
        free_s = max(self._free_s, self.now_s)
        self._steps_s, self._frees_s = [], []
        for number in range(self._num_launched, self._num_launched + num_steps):
            read += num_rows
            step_s = self._latency.step_s(Step(num_rows, num_rows, read, float(read), num_rows, read)) * self.slowness
            if self._chance is not None:
                step_s = self._chance.step_s(number, step_s)
            free_s += step_s
            self._steps_s.append(step_s)
            self._frees_s.append(free_s)
        return [self._free_s, *self._frees_s[:-1]] if in_flight else self._frees_s

    def repeat(self, num_steps: int, *, in_flight: bool, taken: Mapping[str, int]) -> Repeated:
        """As many of the steps as were foreseen, or fewer; what was foreseen of the others stays true."""
        start_s, steps_s, frees_s = self.now_s, self._steps_s[:num_steps], self._frees_s[:num_steps]
        ends_s = [self._free_s, *frees_s[:-1]] if in_flight else frees_s
        rows, totals, tokens, outputs = list[Row](), {}, [], []
        for row, output in zip(self.last.rows, self._output.rows, strict=True):
            assert output.token_id is not None
            block_id = taken.get(row.request_id)
            block_ids = row.block_ids if block_id is None else (*row.block_ids, block_id)
            known, total, written = self._go_on(row, block_ids, output.token_id, num_steps)
            tokens.append(tuple(known[:-1] if in_flight else known[1:]))
            rows.append(_moved(row, block_ids, written, len(rows) if in_flight else known[-2], follows=in_flight))
            outputs.append(RowOutput(token_id=known[-1]))
            totals[row.request_id] = (written, total)
        self.tally.count_plain(len(rows), steps_s)
        self.last, self.last_s = Batch(rows=tuple(rows)), steps_s[-1]
        self._totals, self._output = totals, StepOutput(rows=tuple(outputs))
        self._free_s, self.now_s = frees_s[-1], ends_s[-1]
        del self._steps_s[:num_steps], self._frees_s[:num_steps]
        self._num_launched += num_steps
        began_s = [start_s, *ends_s]
        return Repeated(
            batch=self.last,
            tokens=tokens,
            steps_s=[end_s - before_s for before_s, end_s in pairwise(began_s)],
            pending=Launched(device=self, output=self._output, end_s=self._free_s) if in_flight else None,
            launched_s=began_s[-2],
        )

    def _go_on(self, row: Row, block_ids: Sequence[int], token_id: int, num_steps: int) -> tuple[list[int], int, int]:
        """The row's last token and those that follow; the sum over all positions, and how many these are."""
        start, total = self._totals[row.request_id]
        assert start == row.stop
        assert row.sample is not None
        params, size = row.sample.params, self._vocab_size
        seed, stride = (params.seed * 31, 17) if params.temperature > 0 else (0, 0)
        total += (base := WEIGHT * STRIDE + seed + row.sample.index * stride)  # what `summed_token` adds
        flat, tokens, stop = self._flat, [token_id], start + num_steps
        while start < stop:
            index, offset = divmod(start, self._block_size)
            block_id = block_ids[index]
            if not offset:
                self._content[block_id] = 0
                self._sums[block_id] = 0
            there, added = range(start, min(stop, start + self._block_size - offset)), 0
            place = block_id * self._block_size + offset
            for position in there:
                value = (position + 1) * ((token_id + 1) * 7919 + position) % MODULUS
                added += value - flat[place]
                flat[place] = value
                total += value + stride
                token_id = total % MODULUS % size
                tokens.append(token_id)
                place += 1
            self._sums[block_id] += added
            start = there.stop
        return tokens, total - base - num_steps * stride, stop

    def _compute(self, batch: Batch) -> StepOutput:
        """All rows write before any reads. A sequence that only went on by a token need not be read again."""
        rows = batch.rows
        added = [self._write(row, self._tokens(row)) for row in rows]
        totals: dict[str, tuple[int, int]] = {}
        outputs = []
        for row, value in zip(rows, added, strict=True):
            if self._thorough and self.began.get(row.request_id) is None:
                self.began[row.request_id] = row.start
            if row.sample is None:
                outputs.append(RowOutput(prompt_logprobs=_logprobs(row)) if row.prompt_targets else _NOTHING)
                continue
            known = self._totals.get(row.request_id)
            if value is None or known is None or known[0] != row.start or self._thorough:
                stop = row.stop
                total = self._total(row.block_ids, stop)
            else:
                stop, total = known[0] + 1, known[1] + value
            totals[row.request_id] = (stop, total)
            token_id = summed_token(total, weight=WEIGHT, vocab_size=self._vocab_size, sample=row.sample)
            outputs.append(RowOutput(token_id=token_id, prompt_logprobs=_logprobs(row)))
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
        assert cut.units == range(len(content)), "all simulated workers have blocks of one size"
        return Payload(
            content=content,
            nbytes=int(len(cut.units) * share * self._layout.block_bytes),
            sums=[self._sums[block_id] for block_id in cut.block_ids],
        )

    def write(self, cut: Cut, payload: Payload) -> None:
        self.put(cut.block_ids, payload.content.reshape(len(cut.block_ids), self._block_size), payload.sums)

    def content(self, block_ids: Sequence[int]) -> Any:
        """A copy of whole blocks."""
        return self._content[list(block_ids)]

    def put(self, block_ids: Sequence[int], content: Any, sums: Sequence[int] | None = None) -> None:
        """Overwrites whole blocks. `sums` are the new ones', or None if they are not known."""
        ids, rows = list(block_ids), np.asarray(content)
        self._content[ids] = rows
        for block_id, total in zip(ids, rows.sum(axis=1).tolist() if sums is None else sums, strict=True):
            self._sums[block_id] = total

    def wait_until(self, when_s: float) -> None:
        """What is launched from now on begins no sooner."""
        self._free_s = max(self._free_s, when_s)

    def _write(self, row: Row, token_ids: Sequence[int]) -> int | None:
        """What was written, if it is one position. A block that is begun anew loses what an earlier owner left."""
        size, start = self._block_size, row.start
        if len(token_ids) == 1:
            block_id, offset = row.block_ids[start // size], start % size
            value = (start + 1) * ((token_ids[0] + 1) * 7919 + start) % MODULUS
            if offset == 0:
                self._content[block_id] = 0
                self._sums[block_id] = value
            else:
                self._sums[block_id] += value - self._flat[block_id * size + offset]
            self._flat[block_id * size + offset] = value
            return value
        values = weighed(token_ids, start) % MODULUS
        stop = start + len(token_ids)
        first_full, stop_full = -(-start // size), stop // size
        if first_full < stop_full:
            whole = values[first_full * size - start : stop_full * size - start]
            self.put(row.block_ids[first_full:stop_full], whole.reshape(-1, size))
        for index in sorted({start // size, (stop - 1) // size}):
            if first_full <= index < stop_full:
                continue
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


def _moved(row: Row, block_ids: tuple[int, ...], stop: int, last: int, *, follows: bool) -> Row:
    """The row so many plain steps on that it ends at `stop`, also if it has just read the last of a prompt; `last` is
    its token, or which row it follows: its own of the step before, even if its token was known then, as after a
    preemption."""
    assert row.sample is not None
    return Row(
        request_id=row.request_id,
        token_ids=() if follows else (last,),
        start=stop - 1,
        block_ids=block_ids,
        sample=Sample(params=row.sample.params, index=row.sample.index + stop - row.stop),
        prompt_len=row.prompt_len,
        follows=last if follows else None,
    )


def _logprobs(row: Row) -> tuple[Logprobs, ...]:
    """Of the prompt's positions after the row's: what a client can check is which token each is of."""
    return tuple(
        [Logprobs(chosen=TokenLogprob(token_id=target, logprob=-1.0), rank=1) for target in row.prompt_targets]
    )


def weighed(token_ids: Sequence[int], start: int) -> Any:
    """What `workers.toy` adds up for these tokens at positions from `start` on: (i + 1) * kv[i], int64."""
    num = len(token_ids)
    positions = np.arange(start, start + num, dtype=np.int64)
    ids = np.frombuffer(pack(f"{num}q", *token_ids), dtype=np.int64)  # several times as fast as np.array
    return (positions + 1) * ((ids + 1) * 7919 + positions)
