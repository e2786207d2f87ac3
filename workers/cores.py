"""Which cores a rank's compute threads run on: distinct physical ones of one memory node, which no other rank has.

A rank holds a locked file for each of its cores until its process ends: so the ranks on a host, of any worker or
cluster, divide its cores without messages. If fewer cores are free than there are threads, none is bound: the system
schedules threads that share cores better.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protos.hints import counted

log = logging.getLogger("baton.worker")

SYSFS = Path("/sys/devices/system")
TRIES = 100
"""Tries to claim a core. One fails only if another rank releases that core, or the last core, at the same instant."""

NUM_SPINS = 1000
"""26 us on an AMD EPYC. Of 0, 100, 1000, 3000, 10,000 and 30,000 the most that left a step beside two busy processes as
short as the fewest (50 to 80 ms; 10,000: 460 ms, unlimited: 1.6 s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core. `cpu`: the first of its hyperthreads that this process may use; `node`: its memory node."""

    cpu: int
    node: int


def read_cores(allowed: Collection[int], sysfs: Path = SYSFS) -> tuple[Core, ...]:
    """The physical cores behind the CPUs in `allowed`, in order; a CPU without an entry counts as a core."""
    nodes = {
        cpu: node for node in _numbered(sysfs / "node", "node") for cpu in _list(sysfs / f"node/node{node}/cpulist")
    }
    seen: set[tuple[int, int]] = set()
    cores = []
    for cpu in sorted(allowed):
        topology = sysfs / f"cpu/cpu{cpu}/topology"
        place = (_number(topology / "physical_package_id", 0), _number(topology / "core_id", -1 - cpu))
        if place not in seen:
            seen.add(place)
            cores.append(Core(cpu=cpu, node=nodes.get(cpu, 0)))
    return tuple(cores)


def choose(
    cores: Sequence[Core], num_threads: int, take: Callable[[int], bool], leave: Callable[[int], None]
) -> list[int]:
    """Chooses a CPU for each thread, of one memory node if `take` can claim enough there, else of several; [] if
    there are too few. Cores claimed in vain are released."""
    if num_threads < 1 or len(cores) < num_threads:
        return []
    of_nodes = [[core.cpu for core in cores if core.node == node] for node in sorted({core.node for core in cores})]
    for candidates in [*(cpus for cpus in of_nodes if len(cpus) >= num_threads), [core.cpu for core in cores]]:
        taken: list[int] = []
        for cpu in candidates:
            if len(taken) < num_threads and take(cpu):
                taken.append(cpu)
        if len(taken) == num_threads:
            return taken
        for cpu in taken:
            leave(cpu)
    return []


class Cores:
    """The cores that this process has claimed. Each computing thread calls `bind` before it starts others."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-cores-{os.getuid()}"
        self._locks: dict[int, int] = {}
        self.cpus: tuple[int, ...] = ()
        self.near: tuple[int, ...] = ()

    def claim(self, cores: Sequence[Core], num_threads: int) -> tuple[int, ...]:
        try:
            self.cpus = tuple(choose(cores, num_threads, self._take, self._leave))
        except OSError as error:
            log.warning("cores cannot be claimed in %s, threads are not bound: %s", self._folder, error)
            self.release()
        nodes = {core.node for core in cores if core.cpu in self.cpus}
        self.near = tuple(core.cpu for core in cores if core.node in nodes)
        return self.cpus

    def bind(self) -> None:
        """The calling thread, and those it starts. Never raises."""
        _bind(self.cpus)

    def stay_near(self) -> None:
        """Binds the thread to all cores of the same memory nodes, for a thread that allocates memory for computing
        threads."""
        _bind(self.near)

    def release(self) -> None:
        for cpu in tuple(self._locks):
            self._leave(cpu)
        self.cpus = self.near = ()

    def _take(self, cpu: int) -> bool:
        path = self._folder / str(cpu)
        for _ in range(TRIES):
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the rank that released the last core has just removed the folder
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            try:
                if _is_file(lock, path):
                    self._locks[cpu] = lock
                    return True
            except OSError:  # without the error nothing would close the file
                os.close(lock)
                raise
            os.close(lock)
        return False

    def _leave(self, cpu: int) -> None:
        path, lock = self._folder / str(cpu), self._locks.pop(cpu)
        with suppress(OSError):  # removed by another rank, or cores are in use
            if _is_file(lock, path):
                path.unlink()
            self._folder.rmdir()
        os.close(lock)


def _is_file(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def leave_cores(niceness: int = 0) -> None:
    """Lets the calling thread run on all cores of the process, not only on those of the thread that started it. With a
    higher niceness it gives way to computing threads. Never raises."""
    try:
        if hasattr(os, "sched_getaffinity"):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
        if niceness and sys.platform == "linux":  # elsewhere all threads of a process are as nice
            os.nice(niceness)  # of this thread
    except OSError as error:
        log.warning("a thread stays on the cores of those that compute: %s", error)


def claim_cores(num_threads: int, setting: str, rank: int = 0) -> Cores:
    """Claims cores for a rank of `num_threads`, and logs the result; once a worker it logs that there are too few
    cores. `setting` is `WorkerConfig.bind_cores`."""
    mine = Cores()
    if setting == "off" or not hasattr(os, "sched_getaffinity"):
        return mine
    allowed = os.sched_getaffinity(0)
    wanted = parse_cpus(setting)
    if wanted - allowed:
        log.warning("bind_cores is %r, and this process may use %s: nothing is bound", setting, sorted(allowed))
    elif wanted:
        mine.cpus = mine.near = tuple(sorted(wanted))
    elif not mine.claim(read_cores(allowed), num_threads):
        log.log(
            logging.DEBUG if rank else logging.INFO,
            "threads are not bound to cores: each rank needs %d of its own, and not enough are free", num_threads,
        )  # fmt: skip
    if mine.cpus:
        cpus = ", ".join(map(str, mine.cpus))
        log.info("%s bound to CPU%s %s", counted(num_threads, "thread"), "s" if len(mine.cpus) > 1 else "", cpus)
    return mine


def num_cores() -> int:
    """Returns the number of physical cores of this process, which is torch's default number of threads."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(read_cores(os.sched_getaffinity(0)))


def spin_briefly() -> None:
    """Torch's idle threads sleep after polling `NUM_SPINS` times, as those of the CPU kernels do (threads.cpp).

    GNU's OpenMP, which torch uses, otherwise polls 300,000 times, 8 to 20 ms, at each end of a parallel region, on a
    core that the kernels' threads or another process may need. Call it before torch is imported, which reads the
    variable once; a value set by the user is kept.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))


def _bind(cpus: tuple[int, ...]) -> None:
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:  # the process's own share has shrunk since
            log.warning("threads cannot be bound to CPUs %s: %s", ", ".join(map(str, cpus)), error)


def parse_cpus(text: str) -> set[int]:
    """{0, 1, 2, 8} of "0-2,8"; {} for an invalid list."""
    cores: set[int] = set()
    with suppress(ValueError):
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        return cores
    return set()


def _list(path: Path) -> set[int]:
    try:
        return parse_cpus(path.read_text())
    except OSError:
        return set()


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def _numbered(folder: Path, prefix: str) -> list[int]:
    names = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}[0-9]*"))
    return sorted(int(name) for name in names if name.isdigit())
