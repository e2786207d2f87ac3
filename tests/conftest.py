"""The conditions every test runs under: one thread per library, nothing online, gpu tests only where there is one."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.forked_runner import ForkedRunner

STATE = Path(tempfile.gettempdir()) / f"baton-tests-{os.getpid()}"
"""The state directory of `baton up` in tests. Processes that run them are forked from this one, which removes it."""
atexit.register(lambda: STATE.name.endswith(f"-{os.getpid()}") and shutil.rmtree(STATE, ignore_errors=True))

# Set before anything imports torch, tokenizers or Ray, and inherited by the processes that tests start.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    XDG_STATE_HOME=str(STATE),
    RAY_AUTH_MODE="disabled",  # `ray start --head` would turn it on for a token in the home folder, and its nodes not
)

HAS_GPU = shutil.which("nvidia-smi") is not None

# Without a GPU, Triton interprets its kernels. It looks when it is first imported, which transformers may do for us.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

FUZZ = "BATON_FUZZ"
"""The environment's seed of `make fuzz`, which draws new examples. Elsewhere a test draws the same ones every time."""

timeless: dict[str, Any] = {"deadline": None, "print_blob": True}
timeless["suppress_health_check"] = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("same", derandomize=True, **timeless)
settings.register_profile("fuzz", max_examples=1000, **timeless)
settings.load_profile("fuzz" if FUZZ in os.environ else "same")
if FUZZ not in os.environ:  # Hypothesis draws constants of all modules that the process has imported by then
    providers._get_local_constants = Constants


# A shell starts what it does not wait for (`make test &`) deaf to Ctrl-C, and a process passes that on: neither a
# command that a test interrupts nor these tests themselves could be stopped.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _what_is_logged() -> Iterator[None]:
    """Restores the log: a command configures it for its own process."""
    ours = logging.getLogger("baton")
    level = ours.level
    yield
    ours.setLevel(level)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Makes the numbers of torch's own generator independent of the tests before in the same process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Restores signal handlers: a command installs its own, and a closed uvloop leaves them, so Ctrl-C would not reach
    later tests."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the gpu tests on a machine without one; pytest's summary line counts them as deselected. Tests that
    start a Ray come first: they take longest. Those of one cluster follow one another: an idle one takes CPU time."""
    items.sort(key=lambda item: _turn(item, config.rootpath))
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))  # processes start slowly on a machine that does much else
    if HAS_GPU:
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="run the tests in so many processes (forked_runner.py)")


PREPARING = pytest.StashKey[list[subprocess.Popen[str]]]()


def pytest_collection(session: pytest.Session) -> None:
    """While the tests are being found, the programs that they need are installed, and the CPU's kernels are compiled:
    once, and not while a test waits for a worker."""
    if _in_processes(session):
        session.stash[PREPARING] = [
            subprocess.Popen(command, cwd=session.config.rootpath, stdout=output, stderr=subprocess.STDOUT, text=True)
            for command, output in (
                ([".ci/packages"], subprocess.PIPE),
                ([sys.executable, "-m", "workers.kernels.cpu"], subprocess.DEVNULL),  # tests say why it fails
            )
        ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    for process in session.stash.get(PREPARING, []):  # where no test has run
        process.kill()
        process.communicate()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not (_in_processes(session) and session.items) or session.testsfailed:
        return None
    for process in session.stash[PREPARING]:
        if output := process.communicate()[0]:
            print(output, end="")
    del session.stash[PREPARING]
    root = session.config.rootpath
    ForkedRunner(session, lambda file: _group(root, file)).run(session.config.option.processes)
    return True


def _in_processes(session: pytest.Session) -> bool:
    return bool(session.config.option.processes) and not session.config.option.collectonly


def _turn(item: pytest.Item, root: Path) -> int:
    if _group(root, item.nodeid.partition("::")[0]) != "ray":
        return 6
    names = getattr(item, "fixturenames", ())
    turns = {"last_up": 5, "up": 4, "last_four": 2, "four": 1}
    return next((turn for name, turn in turns.items() if name in names), 0)


RAY = re.compile(r"\b(up|four): Deployed|RayHosts|(Deployed|deploy)\(\s*\"(up|serve|pools)\"")


@cache  # a file has many tests
def _group(root: Path, file: str) -> str:
    """Groups files that must run in one process: there is room for one Ray, and for one test with the GPU."""
    if HAS_GPU:
        return "gpu"
    return "ray" if RAY.search((root / file).read_text()) else file
