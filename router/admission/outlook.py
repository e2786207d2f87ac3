"""What the fleet's load promises a request that is not there yet. Pure functions over candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.values import WorkerRole
from router.policies.base import Candidate
from router.policies.costs import load_s

HALF_LIFE_S = 3.0
_ATTACK = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a worker may have before it before new work waits at the gateway instead, where it can still be ordered.

    A reader is busy with prompts for more than `max_backlog_s` (at its measured speed), or with `max_waiting` requests
    that have not begun; a writer has fewer free blocks than a request needs.
    """

    max_backlog_s: float
    max_waiting: int

    def reads(self, candidate: Candidate) -> bool:
        speed = candidate.prefill_tokens_per_s
        in_time = not speed or candidate.queued_prefill_tokens <= self.max_backlog_s * speed
        return candidate.num_waiting < self.max_waiting and (in_time or not candidate.num_waiting)

    def writes(self, candidate: Candidate, num_blocks: int) -> bool:
        return candidate.num_free_blocks > num_blocks or not candidate.num_requests

    def fits(self, candidates: Iterable[Candidate], num_blocks: int) -> bool:
        """Is there a worker, or a pair of them, that would begin with a request of so many blocks soon? Where nobody
        writes at all the answer is yes: what to do then is for the dispatcher to say."""
        reads = writes = alone = has_writers = False
        for candidate in candidates:
            if candidate.role is WorkerRole.PREFILL:
                reads = reads or self.reads(candidate)
            else:
                has_writers = True
                room = self.writes(candidate, num_blocks)
                writes = writes or room
                alone = alone or (room and self.reads(candidate))
            if alone or (reads and writes):
                return True
        return not has_writers


class Overrun:
    """How much later than predicted first tokens have come lately: what steps in between, full writers and a burst add.
    Learned soon, forgotten by half in `HALF_LIFE_S`, so that nobody is refused for long for what is over."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since_s = 0.0

    def observe(self, seconds: float, *, now: float) -> None:
        known = self.at(now)
        self._seconds, self._since_s = known + _ATTACK * max(0.0, seconds - known), now

    def at(self, now: float) -> float:
        return float(self._seconds * 0.5 ** ((now - self._since_s) / HALF_LIFE_S))


def predicted_ttft_s(candidates: Sequence[Candidate], num_tokens: int, num_ahead: int) -> float | None:
    """Seconds to the first token on the best reader, with `num_ahead` prompt tokens in line before it at the gateway.

    What is in line is shared out by all readers. None while no reader's speed is known.
    """
    readers = readers_of(candidates)
    speed = reading_speed(readers)
    if not speed:
        return None
    return num_ahead / speed + min(_reading_s(reader, num_tokens) for reader in readers if reader.prefill_tokens_per_s)


def least_ttft_s(candidates: Sequence[Candidate], num_tokens: int) -> float | None:
    """Seconds to the first token on the best reader if nothing else were to be done; None while a reader has not been
    measured, which may be the fastest."""
    readers = readers_of(candidates)
    if not all(reader.prefill_tokens_per_s for reader in readers):
        return None
    return min((_idle_s(reader, num_tokens) for reader in readers), default=None)


def reading_speed(candidates: Sequence[Candidate]) -> float:
    """Tokens a second of all readers; 0 while none has been measured."""
    return sum(reader.prefill_tokens_per_s for reader in readers_of(candidates))


def _reading_s(reader: Candidate, num_tokens: int) -> float:
    """As the worker measures its steps, or as first tokens have come of late, which also waited for each other's steps
    and for answers in between: whatever is longer. Of one with nothing to read the shorter: were it believed to be late
    for good, nobody would be sent there to find out."""
    if not reader.queued_prefill_tokens:
        return _idle_s(reader, num_tokens)
    before = reader.queued_prefill_tokens + num_tokens - reader.num_cached_tokens
    return max(before / reader.prefill_tokens_per_s, reader.reading(before)) + load_s(reader)


def _idle_s(reader: Candidate, num_tokens: int) -> float:
    missing = num_tokens - reader.num_cached_tokens
    stepping_s = missing / reader.prefill_tokens_per_s
    return min(stepping_s, reader.reading(missing) or stepping_s) + load_s(reader)


def readers_of(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that read prompts: the prefill pool if there is one."""
    readers = [candidate for candidate in candidates if candidate.role is WorkerRole.PREFILL]
    return readers or candidates
