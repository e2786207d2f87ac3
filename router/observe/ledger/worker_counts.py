"""Tokens that workers report as computed, to be compared with the rows of requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.jobs import WorkerView
from router.observe.ledger.rows import WorkerCount

Start = tuple[str, int]
"""A worker's id, and its incarnation."""


class WorkerCounts:
    """The latest counts of each worker, and the written ones."""

    def __init__(self) -> None:
        self._latest: dict[Start, WorkerCount] = {}
        self._written: dict[Start, WorkerCount] = {}

    def look(self, workers: Sequence[WorkerView], minute: int) -> list[WorkerCount]:
        """Returns the first count of a new worker and the last of one that is gone."""
        seen = {(worker.worker_id, worker.info.incarnation): worker for worker in workers if worker.info is not None}
        due = [self._latest[start] for start in self._latest.keys() - seen.keys() if self._is_news(start)]
        for start in self._latest.keys() - seen.keys():
            del self._latest[start], self._written[start]
        for start, worker in seen.items():
            count = WorkerCount(
                worker=start[0],
                incarnation=start[1],
                minute=minute,
                prompt_tokens=worker.load.num_prompt_tokens,
                output_tokens=worker.load.num_output_tokens,
                before=worker.tokens_before,
            )
            if start not in self._latest and not count.num_tokens:
                continue  # the worker's earlier counts are unknown before its first load
            if start not in self._latest:
                self._written[start] = count
                due.append(count)
            if (
                start not in self._latest or count.num_tokens >= self._latest[start].num_tokens
            ):  # a lost worker has no new count
                self._latest[start] = count
        return due

    def news(self) -> list[WorkerCount]:
        due = [count for start, count in self._latest.items() if self._is_news(start)]
        self._written.update(self._latest)
        return due

    def _is_news(self, start: Start) -> bool:
        return self._latest[start].num_tokens != self._written[start].num_tokens
