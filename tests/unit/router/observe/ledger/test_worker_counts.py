"""Which of the workers' counts are written down, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from protos.values import WorkerLoad
from router.jobs import WorkerView
from router.observe.ledger.rows import WorkerCount
from router.observe.ledger.worker_counts import WorkerCounts


def worker(worker_id: str, incarnation: int, output_tokens: int) -> WorkerView:
    info, load = SimpleNamespace(incarnation=incarnation), WorkerLoad(num_output_tokens=output_tokens)
    return cast(WorkerView, cast(Any, SimpleNamespace(worker_id=worker_id, info=info, load=load, tokens_before=(0, 0))))


def told(counts: list[WorkerCount]) -> list[tuple[str, int, int, int]]:
    return sorted((count.worker, count.incarnation, count.minute, count.output_tokens) for count in counts)


def test_the_first_count_is_written_at_once_then_changes() -> None:
    counts = WorkerCounts()
    assert told(counts.look([worker("a", 1, 2), worker("b", 1, 7)], 5)) == [("a", 1, 5, 2), ("b", 1, 5, 7)]
    assert counts.news() == []
    assert counts.look([worker("a", 1, 3), worker("b", 1, 7)], 5) == []
    assert told(counts.news()) == [("a", 1, 5, 3)]
    assert counts.news() == []


def test_a_lost_workers_last_count_is_written() -> None:
    counts = WorkerCounts()
    counts.look([worker("a", 1, 1)], 5)
    counts.look([worker("a", 1, 9)], 6)
    assert told(counts.look([worker("a", 2, 0)], 7)) == [("a", 1, 6, 9)]
    assert counts.look([], 8) == [], "it computed nothing that is not written"


def test_a_lost_worker_without_a_load_keeps_its_count() -> None:
    counts = WorkerCounts()
    counts.look([worker("a", 1, 1)], 5)
    counts.look([worker("a", 1, 9)], 5)
    counts.look([worker("a", 1, 0)], 5)
    assert told(counts.news()) == [("a", 1, 5, 9)]


def test_a_worker_is_counted_from_its_first_load_on() -> None:
    counts = WorkerCounts()
    assert counts.look([worker("a", 1, 0)], 5) == []
    assert told(counts.look([worker("a", 1, 7000)], 5)) == [("a", 1, 5, 7000)]
