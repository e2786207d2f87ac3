"""What the fleet's load promises a request that is not there yet. Pure functions over candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.values import WorkerRole
from router.policies.base import Candidate


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
        reads or nobody writes at all the answer is yes: what to do then is for the dispatcher to say."""
        readers = writers = 0
        reads = writes = alone = False
        for candidate in candidates:
            if candidate.role is WorkerRole.PREFILL:
                readers += 1
                reads = reads or self.reads(candidate)
            else:
                writers += 1
                room = self.writes(candidate, num_blocks)
                writes = writes or room
                alone = alone or (room and self.reads(candidate))
            if alone or (reads and writes):
                return True
        return not writers or (not readers and not writers)


def predicted_ttft_s(candidates: Sequence[Candidate], num_tokens: int, num_ahead: int) -> float | None:
    """Seconds to the first token on the best reader, with `num_ahead` prompt tokens in line before it at the gateway.

    What is in line is shared out by all readers. None while no reader's speed is known.
    """
    readers = readers_of(candidates)
    speed = sum(reader.prefill_tokens_per_s for reader in readers)
    if not speed:
        return None
    times = [
        (reader.queued_prefill_tokens + num_tokens - reader.num_cached_tokens) / reader.prefill_tokens_per_s
        for reader in readers
        if reader.prefill_tokens_per_s
    ]
    return num_ahead / speed + min(times)


def readers_of(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that read prompts: the prefill pool if there is one."""
    readers = [candidate for candidate in candidates if candidate.role is WorkerRole.PREFILL]
    return readers or candidates
