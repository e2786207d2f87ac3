"""Starts rank processes on this machine, finds running ones, and ends them.

Each has a socket in the cluster's folder, which listens before the process exists: a connection either reaches the
process, or shows that it has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.process.channel import MessageChannel
from cluster.supervision.rank import Event, RankSpec
from cluster.supervision.rank_messages import RANK_MESSAGES, AttachRank, RankAttached, RankContact, StopRank
from protos.errors import WorkerLost

BACKLOG = 8
CONTACT_S = 5.0
PROGRAM = "from cluster.process.detached import main; main()"
MODULE = "cluster.supervision.rank_process"
ATTACH_S = 10.0  # a process that listens but does not answer for this long is stopped, or hangs
EXIT_STATUS_S = 0.5  # for the process that reaps to report how a rank ended
EXIT_STATUS_TRIES = 25
MAX_SAID = 300  # characters of the end of a process's stderr


def start_process(
    folder: Path,
    name: str,
    environment: Mapping[str, str],
    *,
    lock: str,
    contact_s: float,
    inherits: Sequence[int] = (),
) -> int:
    """Starts a process and returns its id. The process ends when no other process locks the file `lock` ("" for none),
    or after `contact_s` without contact from a supervisor (0 for never). While it lives it locks NAME.lock, and it gets
    the descriptors in `inherits`. Blocks for about 50 ms. Raises OSError if the machine cannot start another
    process."""
    own = os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(own, fcntl.LOCK_EX)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
    with (
        os.fdopen(own),
        socket.socket(socket.AF_UNIX) as listening,
        (folder / f"{name}.err").open("wb") as errors,
    ):
        listening.bind(socket_of(folder, name))
        listening.listen(BACKLOG)
        descriptor = listening.fileno()
        started = subprocess.run(
            [sys.executable, "-c", PROGRAM, MODULE, str(descriptor), lock, str(contact_s), str(folder / name)],
            pass_fds=[descriptor, own, *inherits], env=dict(environment) | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, check=False,
        )  # fmt: skip
    if started.returncode or not started.stdout:
        error_line = last_line(folder, name)
        raise WorkerLost(f"its process could not be started: {error_line or f'exit code {started.returncode}'}")
    return int(started.stdout)


def socket_of(folder: Path, name: str) -> str:
    return str(folder / f"{name}.s")


def last_line(folder: Path, name: str) -> str:
    """The last line that the process wrote to stderr; "" if none."""
    try:
        lines = (folder / f"{name}.err").read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:MAX_SAID] if lines else ""


def forget(folder: Path, name: str) -> None:
    for file in (Path(socket_of(folder, name)), folder / f"{name}.err", folder / f"{name}.lock"):
        file.unlink(missing_ok=True)


def kill_process(folder: Path, name: str, pid: int) -> None:
    """Kills the process `pid` if it still is that rank's."""
    with suppress(OSError):  # it has ended
        end = os.pidfd_open(pid)
        try:
            if os.fsencode(folder / name) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(end, signal.SIGKILL)
        finally:
            os.close(end)


def end_process(folder: Path, name: str, pid: int) -> None:
    """Like `RankLink.close`, for a process without a link; `pid` is 0 if unknown. A process that never receives its
    spec ends by itself."""
    if pid:
        kill_process(folder, name, pid)
    forget(folder, name)


class RankLink:
    """The link to a rank process of this machine. `exit_status` returns, if known, how the process `pid` ended: a
    signal as a negative number."""

    def __init__(self, folder: Path, name: str, pid: int, channel: MessageChannel, exit_status: ExitStatus) -> None:
        self.name = name
        self.pid = pid
        self._folder = folder
        self._channel = channel
        self._exit_status = exit_status
        self._contact = asyncio.create_task(self._keep_contact())

    @classmethod
    async def connect(
        cls, folder: Path, name: str, pid: int, first: RankSpec | AttachRank, exit_status: ExitStatus
    ) -> RankLink:
        """Sends the process its spec, or attaches to one that an earlier supervisor started. Raises WorkerLost if it
        has ended, has no spec yet, or does not answer."""
        try:
            channel = await MessageChannel.to(socket_of(folder, name), RANK_MESSAGES)
        except OSError:
            raise WorkerLost(await why_ended(folder, name, pid, exit_status)) from None
        channel.send(first)
        answer: RankAttached | None = None
        try:
            async with asyncio.timeout(ATTACH_S):
                answer = await channel.receive()
            if answer is None:
                raise WorkerLost(await why_ended(folder, name, pid, exit_status))
            if not answer.has_orders:
                raise WorkerLost("its process had no spec yet when its supervisor ended")
        except (TimeoutError, WorkerLost) as error:
            kill_process(folder, name, answer.pid if answer is not None else pid)
            await channel.close()
            if isinstance(error, WorkerLost):
                raise
            raise WorkerLost(f"its process {pid} has not answered for {ATTACH_S:g} s") from None
        return cls(folder, name, answer.pid, channel, exit_status)

    async def news(self) -> Sequence[Event]:
        """The rank's next events. Raises WorkerLost if its process has ended."""
        message: Event | None = await self._channel.receive()
        if message is None:
            raise WorkerLost(await why_ended(self._folder, self.name, self.pid, self._exit_status))
        return (message,)

    async def _keep_contact(self) -> None:
        """Keeps the cluster alive while this process runs."""
        while True:
            self._channel.send(RankContact())
            await asyncio.sleep(CONTACT_S)

    async def stop(self) -> None:
        self._channel.send(StopRank())
        await self._channel.flush()
        await ended(self.pid)

    async def close(self) -> None:
        self._contact.cancel()
        kill_process(self._folder, self.name, self.pid)
        await self._channel.close()
        forget(self._folder, self.name)


ExitStatus = Callable[[int], "int | None"]


async def ended(pid: int) -> None:
    try:
        end = os.pidfd_open(pid)
    except OSError:
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(end, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(end)
        os.close(end)


def has_ended(pid: int) -> bool:
    try:
        end = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([end], [], [], 0)[0])
    finally:
        os.close(end)


async def why_ended(folder: Path, name: str, pid: int, exit_status: ExitStatus) -> str:
    for _ in range(EXIT_STATUS_TRIES):
        if (status := exit_status(pid)) is not None:
            break
        await asyncio.sleep(EXIT_STATUS_S / EXIT_STATUS_TRIES)
    error_line = last_line(folder, name)
    suffix = f": {error_line}" if error_line else ""
    if status is None:
        return f"its process is gone: it was killed, or crashed (check dmesg for the out-of-memory killer){suffix}"
    if status < 0:
        why = " (check dmesg for the out-of-memory killer)" if -status == signal.SIGKILL else ""
        return f"its process is gone: it was ended by signal {-status}{why}{suffix}"
    return f"its process is gone: it ended with exit code {status}{suffix}"
