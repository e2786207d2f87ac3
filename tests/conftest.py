"""The conditions every test runs under: one thread per library, nothing online, gpu tests only where there is one."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Set before anything imports torch, tokenizers or Ray, and inherited by the processes that tests start.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)

HAS_GPU = shutil.which("nvidia-smi") is not None

# Without a GPU, Triton interprets its kernels. It looks when it is first imported, which transformers may do for us.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# A shell starts what it does not wait for (`make test &`) deaf to Ctrl-C, and a process passes that on: neither a
# command that a test interrupts nor these tests themselves could be stopped.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _what_is_logged() -> Iterator[None]:
    """A command owns its process and says what is logged there; one that a test calls must not decide for the next."""
    ours = logging.getLogger("baton")
    level = ours.level
    yield
    ours.setLevel(level)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """A command that a test calls installs handlers of signals, and a closed uvloop loop leaves them: Ctrl-C would
    not reach the tests after it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the gpu tests on a machine without one; pytest's summary line counts them as deselected."""
    if HAS_GPU:
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]


class FilesStayTogether(LoadFileScheduling):
    """Of tests in several processes; and all files that start a Ray, or may use the GPU, as if they were one: there is
    room for one.

    A process that dies (so a test ends that hangs) costs the test that it ran. pytest-xdist 3.8 would run that one
    again, hand out the dead one's finished files as well, and wait for ever for them.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(self.config.rootpath, nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        files = {name: tests for name, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not files:
            return None
        running = next(iter(files.values()))
        lost = next(test for test, done in running.items() if not done)
        running[lost] = True
        self.workqueue.update((name, tests) for name, tests in files.items() if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return lost

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # one that is not yet, a successor, is asked for when it is
            super()._reschedule(node)

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:  # a process runs the last of its tests only when told what comes after it
            self._reschedule(node)


@cache  # a file has many tests
def _group(root: Path, file: str) -> str:
    if HAS_GPU:
        return "gpu"
    return "ray" if "Deployed" in (root / file).read_text() else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesStayTogether:
    return FilesStayTogether(config, log)
