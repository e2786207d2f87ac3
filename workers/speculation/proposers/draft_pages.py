"""The pages in which a proposer has written its own KV. Pure.

A proposer's storage has a page for each page of the worker's pool, and a sequence uses those of its own block table::

    positions     0 ........ num_written ........ num_tokens ........ num_tokens + drafts
                  |  written here  |  still to write  |  drafted: kept if they turn out right  |

Each page has a mark: the hash of the full block that was written into it, or the sequence that is writing it. Only the
proposer writes its storage, so a mark stays true whatever the pool does with the page meanwhile. A sequence begins
with the leading pages whose marks are its own hashes: blocks that another sequence computed here. It lacks those that
came from another worker or from the host, and pages whose tokens were never drafted for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.speculation.proposer import SpeculatedSequence


@dataclass(slots=True)
class _Written:
    """Pages written for one sequence. `pages` hold positions below `num`; the first `num_marked` have the hashes of
    their blocks as marks. `draft_ids` are in the pages from position `num` on."""

    pages: list[int] = field(default_factory=list)
    num: int = 0
    num_marked: int = 0
    draft_ids: tuple[int, ...] = ()


class DraftPages:
    """`group`: whose table of a sequence names the pages."""

    def __init__(self, block_size: int, group: int = 0) -> None:
        self.block_size = block_size
        self._group = group
        self._marks: dict[int, bytes | str] = {}
        self._written: dict[str, _Written] = {}

    def __len__(self) -> int:
        return len(self._written)

    def table(self, sequence: SpeculatedSequence) -> list[int]:
        return sequence.tables[self._group]

    def num_written(self, sequence: SpeculatedSequence) -> int:
        written = self._current(sequence)
        while written.draft_ids and written.num < num_tokens(sequence):
            if token_at(sequence, written.num) != written.draft_ids[0]:
                written.draft_ids = ()
                break
            drafts = written.draft_ids[1:]
            self._advance(sequence, written, written.num + 1)
            written.draft_ids = drafts
        return written.num

    def wrote(self, sequence: SpeculatedSequence, stop: int, draft_ids: tuple[int, ...] = ()) -> None:
        """Positions up to `stop` are written, which follow `num_written`, and drafts after them as far as the table
        reaches."""
        written = self._current(sequence)
        if stop > written.num:
            self._advance(sequence, written, stop)
        room = len(self.table(sequence)) * self.block_size - written.num
        written.draft_ids = draft_ids[: max(0, room)]

    def end(self, request_id: str) -> None:
        self._written.pop(request_id, None)

    def _current(self, sequence: SpeculatedSequence) -> _Written:
        table, size = self.table(sequence), self.block_size
        written = self._written.get(sequence.request_id)
        if written is not None and written.pages and table[: len(written.pages)] == written.pages:
            is_partial = written.num % size != 0
            if not is_partial or self._marks.get(written.pages[-1]) == sequence.request_id:
                return written
        num = 0
        for page, block_hash in zip(table, sequence.hashes, strict=False):
            if self._marks.get(page) != block_hash:
                break
            num += 1
        written = _Written(table[:num], num * size, num)
        self._written[sequence.request_id] = written
        return written

    def _advance(self, sequence: SpeculatedSequence, written: _Written, stop: int) -> None:
        table, size = self.table(sequence), self.block_size
        num_full = min(stop // size, len(sequence.hashes))
        for place in range(written.num_marked, num_full):
            self._marks[table[place]] = sequence.hashes[place]
        for page in table[num_full : -(-stop // size)]:
            self._marks[page] = sequence.request_id
        written.num_marked = num_full
        written.pages = table[: -(-stop // size)]
        written.num = stop
        written.draft_ids = ()


def num_tokens(sequence: SpeculatedSequence) -> int:
    return len(sequence.prompt_ids) + len(sequence.output_ids)


def token_at(sequence: SpeculatedSequence, position: int) -> int:
    after = position - len(sequence.prompt_ids)
    return sequence.prompt_ids[position] if after < 0 else sequence.output_ids[after]


def tokens_between(sequence: SpeculatedSequence, start: int, stop: int) -> tuple[int, ...]:
    num_prompt = len(sequence.prompt_ids)
    if stop <= num_prompt:
        return sequence.prompt_ids[start:stop]
    after = tuple(sequence.output_ids[max(0, start - num_prompt) : stop - num_prompt])
    return sequence.prompt_ids[start:] + after if start < num_prompt else after
