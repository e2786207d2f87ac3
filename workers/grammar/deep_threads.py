"""Threads for what recurses as deeply as its input nests, where the input is a client's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty
from typing import ParamSpec, TypeVar

STACK_BYTES = 256 * 2**20
"""Bytes of address space, not of memory. A level of a JSON Schema took 4 KiB of stack to compile, and has ten
characters."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_starting = threading.Lock()  # the setting is the process's; no work is submitted while successors take over


class DeepThreads(ThreadPoolExecutor):
    """So many, started with the first things to do. Compiled code that runs out of a usual stack ends its whole
    process."""

    def __init__(self, name: str, num: int = 1, begin: Callable[[], None] | None = None) -> None:
        """`begin` is called on each thread before anything else."""
        super().__init__(max_workers=num, thread_name_prefix=name, initializer=begin)
        self._name, self._num, self._begin = name, num, begin
        self._next: DeepThreads | None = None

    def successor(self) -> DeepThreads:
        """Starts as many new threads, which take over the queue and later submissions. Work under way is finished; its
        thread ends once these threads have no owner."""
        other = DeepThreads(self._name, self._num, self._begin)
        with _starting, suppress(Empty):
            self._next = other
            while True:
                other._work_queue.put(self._work_queue.get_nowait())
        for _ in range(self._num):
            other.submit(int)  # a thread begins with what is submitted, not with what waits
        return other

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        with _starting:
            others = self._next
            if others is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    return super().submit(fn, *args, **kwargs)
                finally:
                    threading.stack_size(before)
        return others.submit(fn, *args, **kwargs)
