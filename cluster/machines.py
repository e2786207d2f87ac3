"""Ray itself: a private one for this machine, started and stopped with us, or one that runs already.

A private Ray listens on the loopback interface only, asks for a token that nobody else knows, and keeps its files in a
folder of its own, which goes with it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.config import RayConfig
from cluster.placement import Node
from cluster.reachable import check_answers, no_ray
from cluster.scratch import Scratch, kill_users
from cluster.stopping import RAY_THREAD, SIGNALS
from protos.errors import Unavailable

log = logging.getLogger("baton.cluster")

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100 * 2**20  # nothing travels through it; Ray wants at least 75 MB
STOP_S = 10.0  # a Ray that has started ends within one or two
GIVE_UP_S = 1.0  # for one that is still starting, and was killed
OURS = "r"  # Ray opens its folder to everybody, so that it is given one in a folder that is ours alone
LONGEST_SOCKET = f"/baton-12345678/{OURS}/session_2026-11-23_01-49-16_799730_4194304/sockets/plasma_store"
MAX_FOLDER_BYTES = 107 - len(LONGEST_SOCKET)  # unix(7): a socket's path has 107 bytes
PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Ray replaces 127.0.0.1 by the machine's own address, and then listens everywhere, unless clusters are off. Ray
    # reads this setting on Linux, too, in spite of its name (as of 2.60).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class Machines:
    """`start` and `stop` bracket everything else. Ray's calls that wait run on one thread that lives as long as this:
    the kernel ends Ray's processes with the thread that started them. A call that never returns, in C++, is left behind
    by `stop`, and ends with this process (`cluster.stopping.leave`)."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=RAY_THREAD)
        self._starting: Future[None] | None = None
        self._scratch: Scratch | None = None

    @property
    def is_private(self) -> bool:
        return not self._config.address

    @property
    def host(self) -> str:
        """What processes of one machine reach each other by; "" where there may be several machines."""
        return LOOPBACK if self.is_private else ""

    async def start(self) -> None:
        """Raises Misconfigured when there is no Ray at the address, or none can be started."""
        address = self._config.address
        if address:
            await check_answers(address)
        self._starting = self._thread.submit(self._start)
        try:
            await asyncio.wrap_future(self._starting)
        finally:
            _take_signals_back()

    async def stop(self) -> None:
        """Ends the driver, and a private Ray with all its processes, in seconds whatever it is at. Idempotent."""
        if self._starting is None:
            return
        is_up = self._starting.done()
        if not is_up:
            self._kill()
        self._starting = None
        _take_signals_back()
        stopping = asyncio.ensure_future(self.call(self._stop))
        done, _ = await asyncio.wait([stopping], timeout=STOP_S if is_up else GIVE_UP_S)
        if is_up and not done:
            log.warning("Ray has not ended within %g s: it is killed", STOP_S)
        self._kill()
        self._remove()
        self._thread.shutdown(wait=False)
        for task in done:
            task.result()

    async def call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def nodes(self) -> tuple[Node, ...]:
        import ray

        alive = [node["Resources"] for node in await self.call(ray.nodes) if node["Alive"]]
        return tuple(Node(cpus=float(has.get("CPU", 0.0)), gpus=float(has.get("GPU", 0.0))) for has in alive)

    def _start(self) -> None:
        options: dict[str, Any] = {"address": self._config.address, "log_to_driver": False}
        if self.is_private:
            options = self._private()
        import ray

        try:
            _silence()
            _set_apart()
            ray.init(logging_level=logging.ERROR, **options)
        except ConnectionError as error:
            raise no_ray(self._config.address, (str(error).splitlines() or [""])[0]) from error
        except Exception as error:  # Ray raises bare ones
            self._stop()
            raise Unavailable(f"Ray did not start: {error}") from error

    def _private(self) -> dict[str, Any]:
        # Its processes inherit this; Ray reads it when it is imported.
        os.environ.update(PRIVATE | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
        os.environ.pop("RAY_ADDRESS", None)
        root = str(Path(__file__).resolve().parent.parent)
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *(path for path in known if path and path != root)])
        shallow = len(os.fsencode(tempfile.gettempdir())) <= MAX_FOLDER_BYTES
        self._scratch = Scratch(Path(tempfile.gettempdir() if shallow else "/tmp"))
        return {
            "address": "local",
            "include_dashboard": False,
            "log_to_driver": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
            "_temp_dir": str(self._scratch.path / OURS),
        }

    def _stop(self) -> None:
        import ray

        ray.shutdown()
        self._remove()

    def _kill(self) -> None:
        if self._scratch is not None:
            kill_users(self._scratch.path)

    def _remove(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()


def _take_signals_back() -> None:
    """Ray puts handlers of its own below Python's, which print a stack trace whenever we are asked to stop."""
    for number in SIGNALS:
        signal.signal(number, signal.getsignal(number))


def _set_apart() -> None:
    """Ray's processes would be of our process group, and end with a signal to all of it, as `timeout` and a session
    that closes send it, before what runs is finished. There is no setting for it (as of 2.60), so what starts them is
    replaced; they still end with us."""
    from ray._private import services

    if isinstance(popen := getattr(services, "ConsolePopen", None), type):
        setattr(services, "ConsolePopen", functools.partial(popen, process_group=0))  # noqa: B010


def _silence() -> None:
    """Ray prints a paragraph to stdout for every process that dies; the supervisor logs a line. There is no setting for
    it (as of 2.60), so the function that prints is replaced; where Ray has renamed it, the paragraphs are back."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **options: None
