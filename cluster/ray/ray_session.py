"""A Ray session: a private Ray for this machine, started and stopped with its supervisor, or one that runs already.

A private Ray listens on the loopback interface only, requires a token that only its own processes have, and keeps its
files in a folder of its own, which is removed with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from cluster.config.cluster_config import RayConfig
from cluster.process.scratch_dir import kill_users, programs
from cluster.process.signals import RAY_THREAD, SIGNALS
from cluster.ray.machine_part import MachinePart
from cluster.ray.probe import check_answers, no_ray
from cluster.supervision.rank import in_thread
from cluster.supervision.rank_starter import ended, has_ended
from cluster.supervision.worker_placement import NodeResources
from protos.errors import Misconfigured, Unavailable
from protos.listening import netloc
from protos.values import LOOPBACK

log = logging.getLogger("baton.cluster")

Result = TypeVar("Result")

OBJECT_STORE_BYTES = 100 * 2**20  # no data passes through it; Ray requires at least 75 MB
STOP_S = 10.0  # a started Ray ends within one or two
LOOK_S = 0.5  # between two checks for ended processes of a Ray that is starting
GIVE_UP_S = 1.0  # for a Ray that was killed while it was starting
PROBE_S = 1.0  # between two connections to a Ray that Baton did not start
PROBE_MISSES = 3
ASK_S = 1.0  # between two health calls to the control store and the raylet, and between two connections to the raylet
DOUBT_S = 3.0  # without an answer
OURS = "r"  # a private folder for Ray's, which all users can access
LONGEST_SOCKET = f"/baton-12345678/{OURS}/session_2026-11-23_01-49-16_799730_4194304/sockets/plasma_store"
MAX_FOLDER_BYTES = 107 - len(LONGEST_SOCKET)  # unix(7): the path of a socket has at most 107 bytes
VITAL = {"gcs_server": "control store (GCS)", "raylet": "raylet"}
"""Processes without which Ray cannot run: Ray's names, and names for people. The raylet ends with its agents."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # an empty request queries the server as a whole
PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_USE_TLS": "0",  # usage statistics are the choice of a Ray cluster's owner; a private Ray sends none
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Ray replaces 127.0.0.1 by the machine's own address, and then listens on all interfaces, unless clusters are off.
    # Despite its name Ray reads this variable on Linux, too (as of 2.60).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


CLIENT_SERVER_FAILED = "Initialization failure from server"
MAX_TRIALS = 3
"""Tries of a connection to Ray's client port, of 30 s each."""
MAX_REASON_CHARS = 300


def short_folder() -> Path:
    """A folder for temporary files, short enough for the paths of Ray's sockets."""
    shallow = len(os.fsencode(tempfile.gettempdir())) <= MAX_FOLDER_BYTES
    return Path(tempfile.gettempdir() if shallow else "/tmp")


def end_private_ray(folder: Path) -> None:
    kill_users(folder / OURS)


class Machines:
    """`start` and `stop` bracket everything else. A private Ray's files are in `folder`, and stay when it ends. It has
    a `part` of the machine, or all of it.
    Blocking calls of Ray run on one thread that lives as long as this object, because the kernel ends Ray's processes
    with the thread that started them. `stop` abandons a call that hangs in C++; it ends with this process."""

    def __init__(self, config: RayConfig, folder: Path, part: MachinePart | None = None) -> None:
        self._config = config
        self._part = part
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=RAY_THREAD)
        self._starting: Future[None] | None = None
        self._where = config.address

    @property
    def is_private(self) -> bool:
        return not self._config.address

    async def start(self) -> None:
        """Raises Misconfigured if there is no Ray at the address, Unavailable if none can be started."""
        address = self._config.address
        if address:
            await check_answers(address)
        self._starting = self._thread.submit(self._start)
        starting: asyncio.Future[Any] = asyncio.wrap_future(self._starting)
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ended_early())
        try:
            await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise Unavailable(f"{ending.result()} while Ray was being started")
            starting.result()
        finally:
            starting.cancel()
            ending.cancel()
            _take_signals_back()

    async def stop(self) -> None:
        """Ends the driver, and a private Ray with all its processes, within seconds in any state. Idempotent."""
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
        self._thread.shutdown(wait=False)
        for task in done:
            task.result()

    async def call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def nodes(self) -> tuple[NodeResources, ...]:
        import ray

        alive = [node["Resources"] for node in await self.call(ray.nodes) if node["Alive"]]
        return tuple(NodeResources(cpus=float(has.get("CPU", 0.0)), gpus=float(has.get("GPU", 0.0))) for has in alive)

    async def lost(self, doubt: Callable[[str], None]) -> str:
        """Returns why Ray is lost: within a second of its end, or when it has not answered for
        `RayConfig.response_timeout_s`. Meanwhile calls `doubt` with a suspected fault, and with "" when it is over."""
        looking = [
            asyncio.ensure_future(self._ended() if self.is_private else self._unreachable(doubt)),
            asyncio.ensure_future(self._silent(doubt)),
        ]
        try:
            done, _ = await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in looking:
                task.cancel()

    async def _ended(self) -> str:
        from ray._private import worker

        node: Any = worker._global_node
        watched = {
            asyncio.ensure_future(ended(one.process.pid)): called
            for name, called in VITAL.items()
            for one in node.all_processes.get(name, ())
        }
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return f"Ray's {' and '.join(sorted(watched[task] for task in done))} has ended"
        finally:
            for task in watched:
                task.cancel()

    async def _ended_early(self) -> str:
        """Returns early if a private Ray ends while it starts: Ray's library would wait a minute."""
        seen: dict[int, str] = {}
        while True:
            await asyncio.sleep(LOOK_S)
            if self.is_private:
                ours = programs(
                    self._folder / OURS, parent=os.getpid()
                )  # a forked child of a raylet is called raylet, too
                seen |= {pid: VITAL[name] for pid, name in ours if name in VITAL}
            for pid, called in seen.items():
                if has_ended(pid):
                    return f"Ray's {called} has ended"

    async def _unreachable(self, doubt: Callable[[str], None]) -> str:
        misses = 0
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await check_answers(self._where, PROBE_S)
            except Misconfigured as error:
                misses += 1
                reason = error.message.partition(";")[0]
                if misses >= PROBE_MISSES:
                    return reason
                doubt(reason)
            else:
                if misses:
                    doubt("")
                misses = 0

    async def _silent(self, doubt: Callable[[str], None]) -> str:
        """A process that is stopped or hangs has not ended: it only does not answer."""
        import ray

        while True:
            await asyncio.sleep(ASK_S)
            asking = in_thread(ray.nodes)
            if reason := await self._unanswered(asking, "control store (GCS)", doubt):
                return reason
            if (error := asking.exception()) is not None:
                return f"Ray cannot list its nodes: {error}"
            for node in (
                asking.result() if self.is_private else ()
            ):  # in a cluster the control store watches the raylets
                checking = asyncio.ensure_future(_raylet_answers(node))
                try:
                    if reason := await self._unanswered(checking, "raylet", doubt):
                        return reason
                finally:
                    checking.cancel()

    async def _unanswered(self, answer: asyncio.Future[Any], what: str, doubt: Callable[[str], None]) -> str:
        """Why Ray is given up if `answer` does not come in time; "" if it does."""
        limit_s = self._config.response_timeout_s
        doubt_s = min(DOUBT_S, limit_s / 2)
        if (await asyncio.wait([answer], timeout=doubt_s))[0]:
            return ""
        doubt(f"Ray's {what} does not answer")
        if not (await asyncio.wait([answer], timeout=limit_s - doubt_s))[0]:
            return f"Ray's {what} has not answered for {limit_s:g} s"
        doubt("")
        return ""

    def _start(self) -> None:
        options: dict[str, Any] = {"address": self._config.address, "log_to_driver": False}
        if self.is_private:
            options = self._private()
        import ray

        try:
            _silence()
            with _without_services() if self.is_private else nullcontext():
                self._init(options)
            if not self.is_private and not self._where.startswith("ray://"):
                self._where = str(ray.get_runtime_context().gcs_address)
        except Exception as error:  # Ray raises plain Exceptions
            if isinstance(error, ConnectionError) and not self.is_private:
                raise no_ray(self._config.address, " ".join(str(error).split())[:MAX_REASON_CHARS]) from error
            self._stop()
            raise Unavailable(f"Ray did not start: {error}") from error

    def _init(self, options: dict[str, Any]) -> None:
        """Initialises Ray, again if it hangs: Ray's client port forks a server for each client, and sometimes the fork
        hangs."""
        import ray

        for trial in range(1, MAX_TRIALS + 1):
            try:
                ray.init(logging_level=logging.ERROR, **options)
            except ConnectionError as error:
                if CLIENT_SERVER_FAILED not in str(error) or trial == MAX_TRIALS:
                    raise
                log.warning("Ray at %s started no server for this client: trying again", self._config.address)
            else:
                return

    def _private(self) -> dict[str, Any]:
        # Inherited by Ray's processes; Ray reads it when it is imported.
        os.environ.update(PRIVATE | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
        os.environ.pop("RAY_ADDRESS", None)
        root = str(Path(__file__).resolve().parents[2])
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *(path for path in known if path and path != root)])
        part: dict[str, Any] = {}
        if self._part is not None:
            part = {"num_cpus": self._part.num_cpus}
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._part.gpus)
        return part | {
            "address": "local",
            "include_dashboard": False,
            "log_to_driver": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
            "_temp_dir": str(self._folder / OURS),
        }

    def _stop(self) -> None:
        import ray

        ray.shutdown()

    def _kill(self) -> None:
        if self.is_private:
            end_private_ray(self._folder)


async def _raylet_answers(node: Mapping[str, Any]) -> None:
    """Returns when the raylet of a node, as `ray.nodes` describes it, has answered a call of gRPC's standard health
    service, which needs no token. A refusal counts as an answer. A failed connection does not: the call is repeated,
    because gRPC gives up a connection attempt after 20 s, also to a raylet that is only slow."""
    import grpc

    address = netloc(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", int(1000 * ASK_S)))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        check = channel.unary_unary(HEALTH_CHECK, request_serializer=bytes, response_deserializer=bytes)
        while True:
            try:
                await check(b"", wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(ASK_S)
                    continue
            return


def _take_signals_back() -> None:
    """Ray installs signal handlers in C++, which print a stack trace when the process is asked to stop: restores
    Python's."""
    for number in SIGNALS:
        signal.signal(number, signal.getsignal(number))


def _silence() -> None:
    """Ray prints a paragraph to stdout for every process that dies; the supervisor logs a line instead. Ray has no
    setting for it (as of 2.60), so its function is replaced. If Ray renames that function, the paragraphs are back."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **options: None


@contextmanager
def _without_services() -> Iterator[None]:
    """A private Ray has one node and one program: Ray's autoscaler, log collector and job server have nothing to do.
    They took 2.4 s of processor time at each start, and 270 MB. `ray.init` has no setting for them (as of 2.60), so the
    functions that start them are replaced. If Ray renames one, that process runs again."""
    from ray._private.node import Node

    names = [name for name in ("start_monitor", "start_log_monitor", "start_api_server") if hasattr(Node, name)]
    starts = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *args, **options: None)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)
