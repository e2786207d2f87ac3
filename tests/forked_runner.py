"""Runs the tests in processes that are forked when all tests have been found: `--processes 3`. Finding them takes 25 s
of CPU time; processes of pytest-xdist would each spend that.

    parent  finds the tests ─▶ forks ─▶ hands out groups (a file, or files that share a cluster), reports the results
    child   asks for a group ─▶ runs its tests ─▶ asks for the next group before it runs the last test, so that fixtures
            that the next group uses, too, live on

A child that ends in the middle of a test (a crash, or a timeout) fails this test; another child runs the rest of its
group.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

Group = Sequence[int]
"""Places of tests in `session.items`."""


@dataclass(slots=True)
class _Child:
    number: int  # of its folder for temporary files
    pid: int
    link: Connection
    waiting: deque[int] = field(default_factory=deque)  # tests that it has been given and has not begun
    running: int | None = None


class ForkedRunner:
    """The parent's side. `group_of`: the name of the group of a file."""

    def __init__(self, session: pytest.Session, group_of: Callable[[str], str]) -> None:
        groups: dict[str, list[int]] = {}
        for place, item in enumerate(session.items):
            groups.setdefault(group_of(item.nodeid.partition("::")[0]), []).append(place)
        self._session = session
        self._hook = session.config.hook
        self._groups = deque[Group](groups.values())
        self._children: dict[Connection, _Child] = {}
        self._num_forked = 0

    def run(self, num_processes: int) -> None:
        """Raises as pytest's own loop does when enough tests have failed."""
        assert threading.active_count() == 1, f"a module of the tests starts a thread: {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # neither copied into children because it was looked at, nor looked at by each of them
        try:
            while len(self._children) < min(num_processes, len(self._groups)):
                self._fork()
            while self._children:
                for link in wait([*self._children]):
                    self._read(self._children[link])  # type: ignore[index]
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for child in self._children.values():
                child.link.close()  # it stops with its next report
            for child in self._children.values():
                os.waitpid(child.pid, 0)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        number, self._num_forked = self._num_forked, self._num_forked + 1
        folder = self._session.config._tmp_path_factory.getbasetemp() / f"process-{number}"  # type: ignore[attr-defined]
        folder.mkdir()
        if not (pid := os.fork()):
            for child in self._children.values():
                child.link.close()
            ours.close()
            _ForkedProcess(self._session, theirs, folder).run()
        theirs.close()
        self._children[ours] = _Child(number, pid, ours)

    def _read(self, child: _Child) -> None:
        try:
            what, content = child.link.recv()
        except (EOFError, ConnectionResetError):
            self._ended(child)
            return
        if what == "next":
            group = self._groups.popleft() if self._groups else ()
            child.waiting.extend(group)
            with suppress(BrokenPipeError):  # its end is read next
                child.link.send(group)
        elif what == "begins":
            child.running = child.waiting.popleft()
            assert child.running == content
        elif what == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=content)
            self._hook.pytest_runtest_logreport(report=report)
        else:
            assert what == "ends"
            child.running = None
            item = self._session.items[content]
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, child: _Child) -> None:
        del self._children[child.link]
        child.link.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        if child.running is None and child.waiting:  # something else than a test ended it
            child.running = child.waiting.popleft()
        if child.running is not None:
            item = self._session.items[child.running]
            why = f"the process of this test has ended {how}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            self._hook.pytest_runtest_logreport(report=report)
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif code:
            print(f"\nafter its last test a process has ended {how}")
        if child.waiting:
            self._groups.appendleft(tuple(child.waiting))
        if self._groups and child.running is not None:
            self._fork()


class _ForkedProcess:
    """The child's side."""

    def __init__(self, session: pytest.Session, link: Connection, folder: Path) -> None:
        self._session = session
        self._link = link
        self._folder = folder

    def run(self) -> NoReturn:
        code = 1
        try:
            self._part_from_the_parent()
            with suppress(BrokenPipeError, KeyboardInterrupt):  # the parent wants no more
                try:
                    self._run_tests()
                finally:
                    self._session._setupstate.teardown_exact(None)
            code = 0
        finally:
            atexit._run_exitfuncs()
            os._exit(code)

    def _part_from_the_parent(self) -> None:
        config = self._session.config
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        atexit.unregister(factory._exit_stack.close)  # the parent removes old folders
        factory._basetemp = self._folder
        terminal = config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_NoReporter(config.get_terminal_writer() if terminal is None else terminal._tw),
                                      "terminalreporter")  # fmt: skip
        config.pluginmanager.register(self)
        if capture := config.pluginmanager.getplugin("capturemanager"):  # the parent's files have one position for all
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()

    def _run_tests(self) -> None:
        items = self._session.items
        for place, following in self._places():
            self._link.send(("begins", place))
            items[place].config.hook.pytest_runtest_protocol(
                item=items[place], nextitem=None if following is None else items[following]
            )
            self._link.send(("ends", place))

    def _places(self) -> Iterator[tuple[int, int | None]]:
        """Each test with its successor."""
        group = self._next_group()
        while group:
            yield from pairwise(group)
            last, group = group[-1], self._next_group()
            yield last, group[0] if group else None

    def _next_group(self) -> Group:
        self._link.send(("next", None))
        group: Group = self._link.recv()
        return group

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook, config = self._session.config.hook, self._session.config
        self._link.send(("report", hook.pytest_report_to_serializable(config=config, report=report)))


class _NoReporter:
    """In a child, for what writes to the terminal without reporting a test: pytest-timeout."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer
