"""Threads that may get stuck: nothing waits for them that others could do."""

from __future__ import annotations

import threading

from workers.grammar.guidance import DeepThreads


def test_what_is_given_to_stuck_threads_is_done_by_their_successors() -> None:
    """Whoever looked them up a moment before they were replaced would wait behind who is stuck, for ever."""
    stuck, end = threading.Event(), threading.Event()
    threads = DeepThreads("stuck")

    def get_stuck() -> None:
        stuck.set()
        end.wait()

    threads.submit(get_stuck)
    assert stuck.wait(60.0)
    try:
        waits = threads.submit(str, 1)
        second = threads.successor()
        third = second.successor()
        tasks = [item.submit(str, number) for number, item in enumerate((threads, second, third), 2)]
        assert [task.result(60.0) for task in (waits, *tasks)] == ["1", "2", "3", "4"]
    finally:
        end.set()
