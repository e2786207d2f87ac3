"""Threads that may get stuck: nothing waits for them that others could do."""

from __future__ import annotations

import os
import threading
from functools import partial

from workers.cores import leave_cores
from workers.grammar.guidance import DeepThreads


def test_stuck_threads_work_is_done_by_successors() -> None:
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


def test_threads_for_fast_requests_do_not_inherit_a_low_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    compiling = DeepThreads("compiling", 1, partial(leave_cores, 5))
    quick, other = DeepThreads("quick", 2, leave_cores), DeepThreads("other", 1, partial(leave_cores, 5))
    submitted = compiling.submit(lambda: [threads.submit(niceness) for threads in (quick, other)])
    assert [each.result(60.0) for each in submitted.result(60.0)] == [niceness(), min(19, niceness() + 5)]
