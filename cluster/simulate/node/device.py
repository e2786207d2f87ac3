"""A simulated device: computes the toy model's tokens in the time of the latency model.

The device keeps the content of every position of a block, so a block that was never sent, was released too early or has
two owners produces a wrong token (`workers.toy`). A sequence is summed up in full when it comes to this device; then
only its new positions are added, unless the device is `thorough`.

A page of a windowed group of layers has at each position the sum of all positions up to it, so a page that is missing
behind the window is not missed. A full sum must agree with the windows, or the token is a wrong one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

import numpy as np

from cluster.simulate.latency.step_work import (
    Latency,
    StepWork,
    WindowShares,
    step_of,
    windowed_step_of,
)
from cluster.simulate.node.simulated_drafts import kv_term, verified_row
from kvtransfer.reshard import Cut
from protos.values import MAX_DRAFTS, KVLayout, Logprobs, TokenLogprob
from workers.batch import Batch, Row, RowLimits, RowOutput, StepOutput
from workers.toy import MODULUS, STRIDE, summed_token

WEIGHT = 7
_NOTHING = RowOutput()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """`nbytes`: of real blocks; `sums`: of the blocks."""

    content: Any  # uint16 [units, positions of a unit]
    nbytes: int
    sums: Sequence[int]


@dataclass(slots=True)
class DeviceWork:
    """A step's time is divided between prompts and answers by tokens."""

    prompt_s: float = 0.0
    answer_s: float = 0.0
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0

    @property
    def busy_s(self) -> float:
        return self.prompt_s + self.answer_s

    def count(self, step: StepWork, num_answer: int, num_drafted: int, step_s: float) -> None:
        """`num_answer` rows decode, with `num_drafted` drafts, of which only the time counts."""
        num_prompt = int(step.num_tokens) - num_answer - num_drafted
        self.num_answer_tokens += num_answer
        self.num_prompt_tokens += num_prompt
        self.answer_s += step_s * (num_answer + num_drafted) / step.num_tokens
        self.prompt_s += step_s * num_prompt / step.num_tokens

    def count_decode(self, num_rows: int, steps_s: Sequence[float]) -> None:
        """Counts steps with a token for each of `num_rows` answers."""
        self.num_answer_tokens += num_rows * len(steps_s)
        for step_s in steps_s:
            self.answer_s += step_s * num_rows / num_rows  # the same bits as with `count`


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A batch whose steps end at `end_s`. `fetch` moves the device's clock there."""

    device: Device
    output: StepOutput
    end_s: float

    def fetch(self) -> StepOutput:
        self.device.now_s = max(self.device.now_s, self.end_s)
        return self.output

    def prolong(self, batch: Batch) -> Launched:
        return self.device.prolong(batch)


class Device:
    """The pipeline of one engine (`workers.batch.Pipeline`) and its KV cache (`workers.transfer.rank_transfer.Blocks`).

    - `now_s`: the engine's own time, set before each of its turns
    - `slowness` multiplies the time of steps from now on
    - `thorough`: `began` keeps the first computed position of each request
    - `shares`: windows that step times depend on
    - `host_s`: the host's work before a step that is launched while none is in flight
    """

    def __init__(
        self,
        latency: Latency,
        *,
        layout: KVLayout,
        num_pages: int,
        vocab_size: int,
        thorough: bool = False,
        shares: WindowShares = (),
        host_s: float = 0.0,
    ) -> None:
        assert all(window is None or window > 1 for window in layout.windows), "a window of 1 keeps no sum"
        self.now_s = 0.0
        self.slowness = 1.0
        self.work = DeviceWork()
        self.began: dict[str, int] = {}
        self.last = Batch(rows=())
        self.last_s = 0.0
        self.before_s = 0.0  # of the previous step, which may still be running
        self._latency = latency
        self._layout = layout
        self._block_size = layout.block_size
        self._vocab_size = vocab_size
        self._thorough = thorough
        self._shares = shares
        self._host_s = host_s
        windows = layout.windows
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._is_plain = windows == (None,)
        self._num_launched = 0
        self._free_s = 0.0
        self._output = StepOutput(rows=())
        self._content = np.zeros((num_pages, layout.block_size), dtype=np.uint16)  # modulo `MODULUS`, as tokens are
        self._flat = self._content.data.cast("B").cast("H")  # the same memory, faster for a few positions
        self._sums = array("q", bytes(8 * num_pages))  # the sum over each page's positions
        self._num_before = 0  # steps launched before the foreseen ones
        self._steps_s: list[float] = []  # foreseen: the duration of each step
        self._ends_s: list[float] = []  # and their ends
        self._totals: dict[str, tuple[int, int]] = {}  # request -> (positions, their sum) of the last batch

    # -- a pipeline ----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Launched:
        rows = [((stop := row.stop) - row.start, stop) for row in batch.rows]
        step = windowed_step_of(rows, self._shares) if self._shares else step_of(rows)
        step_s = self._step_s(step)
        num_drafted = [len(row.draft_ids) for row in batch.rows if row.draft_ids]
        self.work.count(step, int(step.num_single) + len(num_drafted), sum(num_drafted), step_s)
        self._output = self._compute(batch)
        self._num_launched += 1
        exposed_s = self._host_s if self.now_s >= self._free_s else 0.0
        self._free_s = max(self._free_s, self.now_s) + exposed_s + step_s
        self.last, self.before_s, self.last_s = batch, self.last_s, step_s
        return Launched(device=self, output=self._output, end_s=self._free_s)

    def _step_s(self, step: StepWork) -> float:
        return self._latency.step_s(step) * self.slowness

    @property
    def row_limits(self) -> RowLimits:
        return RowLimits(num_steps=sys.maxsize, num_drafts=MAX_DRAFTS)

    def clock(self) -> float:
        return self.now_s

    # -- several steps at once -----------------------------------------------------------------------------------------

    def foresee(self, num_steps: int, *, in_flight: bool) -> list[float]:
        """Returns the ends of `num_steps` further steps, counted from the end of the `in_flight` one, if any."""
        rows = self.last.rows
        num_rows, stops = len(rows), [stop for stop, _ in self._totals.values()]  # each of them sampled
        read, end_s = sum(stops), max(self._free_s, self.now_s)
        self._num_before, self._steps_s, self._ends_s = self._num_launched, [], []
        for number in range(self._num_launched, self._num_launched + num_steps):
            read += num_rows
            step = StepWork(num_rows, num_rows, read, float(read), num_rows, read)
            if self._shares:
                ahead = number + 1 - self._num_launched
                step = windowed_step_of([(1, stop + ahead) for stop in stops], self._shares)
            step_s = self._step_s(step)
            end_s += step_s
            self._steps_s.append(step_s)
            self._ends_s.append(end_s)
        return [self._free_s, *self._ends_s[:-1]] if in_flight else self._ends_s

    def prolong(self, batch: Batch) -> Launched:
        """Extends the last batch by further steps, which were foreseen since its launch."""
        num_steps, first = batch.num_steps - self.last.num_steps, self._num_launched - self._num_before
        steps_s, ends_s = self._steps_s[first : first + num_steps], self._ends_s[first : first + num_steps]
        assert len(steps_s) == num_steps, "the steps have not been foreseen"
        outputs = []
        for row, output in zip(batch.rows, self._output.rows, strict=True):
            outputs.append(RowOutput(token_ids=output.token_ids + self._decode(row, output.token_ids[-1], num_steps)))
        self.work.count_decode(len(outputs), steps_s)
        self._output = StepOutput(rows=tuple(outputs), ends_s=(self._free_s, *ends_s))
        self._num_launched += num_steps
        self._free_s = ends_s[-1]
        self.last, self.before_s, self.last_s = batch, (self.last_s, *steps_s)[-2], steps_s[-1]
        return Launched(device=self, output=self._output, end_s=self._free_s)

    def _decode(self, row: Row, token_id: int, num_steps: int) -> tuple[int, ...]:
        """Returns the tokens of `num_steps` steps after the summed-up positions, the last of which has `token_id`."""
        start, total = self._totals[row.request_id]
        assert row.sample is not None
        params, size = row.sample.params, self._vocab_size
        seed, stride = (params.seed * 31, 17) if params.temperature > 0 else (0, 0)
        index = row.sample.index + start - row.stop  # of the last token
        total += (base := WEIGHT * STRIDE + seed + index * stride)  # as `summed_token` adds
        if not self._is_plain:
            return self._decode_groups(row, token_id, num_steps, total, base, stride)
        flat, tokens, stop, block_ids = self._flat, list[int](), start + num_steps, row.block_ids
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
        self._totals[row.request_id] = (stop, total - base - num_steps * stride)
        return tuple(tokens)

    def _decode_groups(
        self, row: Row, token_id: int, num_steps: int, total: int, base: int, stride: int
    ) -> tuple[int, ...]:
        """Decodes several groups in the same way: `total` includes `base`, to which each step adds `stride`."""
        start, _ = self._totals[row.request_id]
        tokens, added = list[int](), list[int]()
        for position in range(start, start + num_steps):
            added.append((position + 1) * ((token_id + 1) * 7919 + position) % MODULUS)
            total += added[-1] + stride
            token_id = total % MODULUS % self._vocab_size
            tokens.append(token_id)
        self._write_groups(row, start, np.array(added, dtype=np.int64))
        self._totals[row.request_id] = (start + num_steps, total - base - num_steps * stride)
        return tuple(tokens)

    def _compute(self, batch: Batch) -> StepOutput:
        """All rows write before any row reads. A sequence with one new token is not summed up again."""
        rows, before, vocab_size = batch.rows, self._totals, self._vocab_size
        added = [self._write(row, self._tokens(row)) for row in rows]
        totals: dict[str, tuple[int, int]] = {}
        outputs = []
        for row, value in zip(rows, added, strict=True):
            request_id, sample = row.request_id, row.sample
            if self._thorough and self.began.get(request_id) is None:
                self.began[request_id] = row.start
            if sample is None:
                outputs.append(RowOutput(prompt_logprobs=_logprobs(row)) if row.prompt_targets else _NOTHING)
                continue
            start, total = before.get(request_id, (-1, 0))
            if row.draft_ids:
                first = row.stop - len(row.draft_ids)
                if start + 1 == first and start == row.start and not self._thorough:
                    total += kv_term(row.token_ids[0], start)
                else:
                    total = self._total_until(row, first)
                output, *verified = verified_row(row, first, total, weight=WEIGHT, vocab_size=vocab_size)
                totals[request_id] = verified[0], verified[1]
                outputs.append(output)
                self.work.num_answer_tokens += len(output.token_ids) - 1
                continue
            if value is None or start != row.start or self._thorough:
                stop = row.stop
                total = self._total_until(row, stop)
            else:
                stop, total = start + 1, total + value
            totals[request_id] = (stop, total)
            token_id = summed_token(total, weight=WEIGHT, vocab_size=vocab_size, sample=sample)
            prompt_logprobs = _logprobs(row) if row.prompt_targets else ()
            outputs.append(RowOutput(token_ids=(token_id,), prompt_logprobs=prompt_logprobs))
        self._totals = totals
        return StepOutput(rows=tuple(outputs))

    def _tokens(self, row: Row) -> Sequence[int]:
        if row.depends_on_row is None:
            return row.token_ids + row.draft_ids
        token_ids = self._output.rows[row.depends_on_row].token_ids
        assert token_ids, f"request {row.request_id} depends on a row that sampled nothing"
        return (*row.token_ids, token_ids[-1])

    # -- the contents of blocks ----------------------------------------------------------------------------------------

    def read(self, cut: Cut, stage: Callable[[int], object]) -> Payload:
        """Copies whole blocks, also for a part of them: positions have no layers and no heads here."""
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
        return self._content[list(block_ids)]

    def put(self, block_ids: Sequence[int], content: Any, sums: Sequence[int] | None = None) -> None:
        """Overwrites whole blocks. `sums` are those of the new content, or None if unknown."""
        ids, rows = list(block_ids), np.asarray(content)
        self._content[ids] = rows
        for block_id, total in zip(ids, rows.sum(axis=1).tolist() if sums is None else sums, strict=True):
            self._sums[block_id] = total

    def wait(self, seconds: float) -> None:
        """The device is busy with something else than a step."""
        self.now_s = max(self.now_s, self._free_s) + seconds * self.slowness

    def wait_until(self, when_s: float) -> None:
        """Delays the steps launched from now on."""
        self._free_s = max(self._free_s, when_s)

    def _write(self, row: Row, token_ids: Sequence[int]) -> int | None:
        """Returns the written value if it is a single one. A block's first position clears the old content."""
        size, start = self._block_size, row.start
        if not self._is_plain:
            values = weighed(token_ids, start) % MODULUS
            self._write_groups(row, start, values)
            return int(values[0]) if len(values) == 1 else None
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
        self._write_table(row.block_ids, start, weighed(token_ids, start) % MODULUS)
        return None

    def _write_groups(self, row: Row, start: int, values: Any) -> None:
        for group in self._full:
            self._write_table(row.block_tables[group], start, values)
        for group, _ in self._windowed:
            table, before = row.block_tables[group], 0
            if start:
                before = int(self._content[table[(start - 1) // self._block_size], (start - 1) % self._block_size])
            self._write_table(table, start, (before + np.cumsum(values)) % MODULUS)

    def _write_table(self, table: Sequence[int], start: int, values: Any) -> None:
        """Writes values into a table. A page's first position clears its old content."""
        size, stop = self._block_size, start + len(values)
        first_full, stop_full = -(-start // size), stop // size
        if first_full < stop_full:
            whole = values[first_full * size - start : stop_full * size - start]
            self.put(table[first_full:stop_full], whole.reshape(-1, size))
        for index in sorted({start // size, (stop - 1) // size}):
            if first_full <= index < stop_full:
                continue
            low, high = max(start, index * size), min(stop, (index + 1) * size)
            block_id = table[index]
            if low == index * size:
                self._content[block_id] = 0
            self._content[block_id, low - index * size : high - index * size] = values[low - start : high - start]
            self._sums[block_id] = int(self._content[block_id].sum())

    def _total_until(self, row: Row, stop: int) -> int:
        return self._total(row.block_ids, stop) if self._is_plain else self._total_of_groups(row, stop)

    def _total_of_groups(self, row: Row, stop: int) -> int:
        """Returns the sum of positions [0, stop) if all windows agree with it, else another number."""
        size = self._block_size
        sums = [self._total(row.block_tables[group], stop) % MODULUS for group in self._full]
        for group, window in self._windowed:
            first = max(0, stop - window)
            pages = row.block_tables[group][first // size : -(-stop // size)]
            running = self._content[list(pages)].reshape(-1)[first % size :][: stop - first].astype(np.int64)
            sums.append(int(running[-1]))
            if self._full and len(running) > 1:
                pages = row.block_tables[self._full[0]][first // size : -(-stop // size)]
                values = self._content[list(pages)].reshape(-1)[first % size :][: stop - first]
                if ((np.diff(running) - values[1:]) % MODULUS).any():
                    sums.append(sums[0] + 1)
        return sums[0] if len(set(sums)) == 1 else sum(sums) + 1

    def _total(self, block_ids: Sequence[int], stop: int) -> int:
        full, rest = divmod(stop, self._block_size)
        total = sum([self._sums[block_id] for block_id in block_ids[:full]])
        return total + (int(self._content[block_ids[full], :rest].sum()) if rest else 0)


def _logprobs(row: Row) -> tuple[Logprobs, ...]:
    """Logprobs from which a client can check the token of each prompt target."""
    return tuple(
        [Logprobs(chosen=TokenLogprob(token_id=target, logprob=-1.0), rank=1) for target in row.prompt_targets]
    )


def weighed(token_ids: Sequence[int], start: int) -> Any:
    """The terms (i + 1) * kv[i] of `workers.toy` for tokens at positions from `start` on, int64."""
    num = len(token_ids)
    positions = np.arange(start, start + num, dtype=np.int64)
    ids = np.frombuffer(pack(f"{num}q", *token_ids), dtype=np.int64)  # several times as fast as np.array
    return (positions + 1) * ((ids + 1) * 7919 + positions)
