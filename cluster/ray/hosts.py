"""Machines on which ranks run, as the launcher sees them: this one, or a node of a Ray cluster (`actors`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from cluster.process.scratch_dir import share
from cluster.supervision.rank import Event, RankSpec
from cluster.supervision.rank_messages import AttachRank
from cluster.supervision.rank_starter import ExitStatus, RankLink, end_process, start_process
from protos.errors import WorkerLost
from protos.listening import bound
from protos.values import LOOPBACK


class RankConnection(Protocol):
    """The connection to one rank's process, which outlives it."""

    async def news(self) -> Sequence[Event]:
        """The rank's next events. Raises WorkerLost if its process has ended."""
        ...

    async def stop(self) -> None:
        """Requests the process to end, and returns when it has."""
        ...

    async def close(self) -> None:
        """Kills the process if it has not ended yet. Raises nothing."""
        ...


class Host(Protocol):
    """One machine. `start`, `order` and `attach` raise WorkerLost for a process that cannot be started or has ended;
    `meeting_place` raises it if the machine is lost. `end` raises nothing."""

    @property
    def address(self) -> str:
        """Ray's name for the machine; "" for the machine of the supervisor."""
        ...

    async def meeting_place(self) -> tuple[str, int]:
        """An address of this machine that other ranks can reach, and a free port."""
        ...

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        """Starts a rank's process, which waits for its spec. `environment`: variables that differ from this machine's.
        `leader`: the name of rank 0, if it is on the same machine and the rank must end with it; else ""."""
        ...

    async def order(self, name: str, pid: int, orders: RankSpec) -> RankConnection: ...

    async def attach(self, name: str, pid: int) -> RankConnection:
        """Connects to a rank that has its spec."""
        ...

    async def end(self, name: str, pid: int) -> None:
        """Kills a rank's process that has no link, and removes its files. `pid` is 0 if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenShare:
    """A reservation in Ray: the GPUs of each rank, and the node of each by its address, none on this machine."""

    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The machine of each rank of a worker; `devices`: the GPUs of each rank, as in CUDA_VISIBLE_DEVICES."""

    hosts: tuple[Host, ...]
    devices: tuple[str, ...] = ()


class ThisMachine:
    """`folder`: the cluster's; `lock`: a file there that the cluster locks while it lives. With "" ranks share the
    folder and live until `contact_s` without contact."""

    address = ""

    def __init__(
        self, folder: Path, lock: str, exit_status: ExitStatus = lambda pid: None, *, contact_s: float = 0.0
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._exit_status = exit_status
        self._contact_s = contact_s
        self._inherited = [] if lock else [share(folder)]

    async def meeting_place(self) -> tuple[str, int]:
        return LOOPBACK, free_port(LOOPBACK)

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        own = ours(os.environ) | dict(environment)
        lock = self._lock or (str(self._folder / f"{leader}.lock") if leader else "")
        work = partial(
            start_process, self._folder, name, own, lock=lock, contact_s=0.0 if lock else self._contact_s,
            inherits=self._inherited,
        )  # fmt: skip
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise WorkerLost(f"its process could not be started: {error}") from error

    async def order(self, name: str, pid: int, orders: RankSpec) -> RankConnection:
        return await RankLink.connect(self._folder, name, pid, orders, self._exit_status)

    async def attach(self, name: str, pid: int) -> RankConnection:
        return await RankLink.connect(self._folder, name, pid, AttachRank(), self._exit_status)

    async def end(self, name: str, pid: int) -> None:
        end_process(self._folder, name, pid)


def free_port(address: str) -> int:
    with bound(address, 0) as probe:
        return int(probe.getsockname()[1])


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without Ray's variables, above all its token, which a rank does not need."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}
