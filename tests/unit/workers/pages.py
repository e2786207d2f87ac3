"""A runner that writes into each page which group's KV it holds, of which tokens, and asserts that of all it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from kvtransfer.reshard import Cut
from tests.unit.workers.harness import VOCAB
from workers.batch import Batch, Row, RowOutput, StepOutput
from workers.kv.host import FinishedOnload


def answer(prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The answer of a model whose next token depends on every earlier one."""
    text = list(prompt_ids)
    for _ in range(num_tokens):
        text.append(sum((index + 1) * token for index, token in enumerate(text)) % VOCAB)
    return tuple(text[len(prompt_ids) :])


class PageRunner:
    """`num_moved` counts the positions that `write` has brought from another worker."""

    def __init__(self, windows: tuple[int | None, ...], block_size: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.texts: dict[str, tuple[int, ...]] = {}
        self.num_moved = 0
        self._histories: dict[str, list[int]] = {}
        self.pages: dict[int, dict[int, object]] = defaultdict(dict)

    def expect(self, request_id: str, text: tuple[int, ...]) -> None:
        self.texts[request_id] = text
        self._histories[request_id] = list(accumulate(text, lambda before, token: hash((before, token)), initial=0))

    def run(self, batch: Batch) -> StepOutput:
        for row in batch.rows:
            assert row.token_ids == self.texts[row.request_id][row.start : row.stop]
            for group, table in enumerate(row.block_tables):
                for position in range(row.start, row.stop):
                    place = table[position // self.block_size]
                    self.pages[place][position % self.block_size] = self._kv(row, group, position)
        return StepOutput(rows=tuple(map(self._output, batch.rows)))

    def read(self, cut: Cut, stage: Callable[[int], Any]) -> Payload:
        per_block, last = self.block_size // cut.unit, len(cut.block_ids) - 1
        units = []
        for unit in cut.units:
            page = self.pages[cut.block_ids[min(unit // per_block, last)]]
            offset = unit % per_block * cut.unit
            units.append([page.get(offset + position) for position in range(cut.unit)])
        return Payload(units)

    def write(self, cut: Cut, payload: Payload) -> None:
        per_block = self.block_size // cut.unit
        for unit, values in zip(cut.units, payload.units, strict=True):
            for offset, value in enumerate(values, unit % per_block * cut.unit):
                self.pages[cut.block_ids[unit // per_block]][offset] = value
                self.num_moved += 1

    def _output(self, row: Row) -> RowOutput:
        for group, (table, window) in enumerate(zip(row.block_tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, row.start + 1 - window)
            for position in range(first, row.stop):
                stored = self.pages[table[position // self.block_size]].get(position % self.block_size)
                assert stored == self._kv(row, group, position), f"{row.request_id} reads other KV at {position}"
        return RowOutput(token_ids=() if row.sample is None else (self.texts[row.request_id][row.stop],))

    def _kv(self, row: Row, group: int, position: int) -> object:
        return group, self._histories[row.request_id][position + 1]


class PageCopies:
    """The host's copies of a runner's pages. A load is over after `patience` looks; its pages hold nothing before."""

    def __init__(self, runner: PageRunner, patience: int = 0) -> None:
        self.blocks_per_s = 1e9
        self.patience = patience
        self.num_offloaded = self.num_onloaded = 0
        self._runner = runner
        self._slots: dict[int, dict[int, object]] = {}
        self._loads: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._looks: dict[int, int] = {}

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        loading = {slot for slots, _ in self._loads.values() for slot in slots}
        assert not loading & set(slots), "a slot is overwritten while it is loaded"
        for page, slot in zip(block_ids, slots, strict=True):
            self._slots[slot] = dict(self._runner.pages[page])
        self.num_offloaded += len(slots)

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for page in block_ids:
            self._runner.pages[page] = {}
        self._loads[load_id], self._looks[load_id] = (slots, block_ids), 0
        self.num_onloaded += len(slots)

    def finished(self) -> list[FinishedOnload]:
        over = [load_id for load_id, looks in self._looks.items() if looks >= self.patience]
        self._looks = {load_id: looks + 1 for load_id, looks in self._looks.items() if load_id not in over}
        return [FinishedOnload(load_id=load_id, elapsed_s=0.125) for load_id in over]

    def await_copy(self, load_id: int) -> None:
        slots, block_ids = self._loads.pop(load_id)
        for slot, page in zip(slots, block_ids, strict=True):
            self._runner.pages[page] = dict(self._slots[slot])


class Payload:
    """The values of each unit."""

    def __init__(self, units: list[list[object]]) -> None:
        self.units = units
        self.nbytes = 8 * sum(map(len, units))
