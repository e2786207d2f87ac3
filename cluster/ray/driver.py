"""The process that loads Ray's library, and serves nothing. It may end at any time, also killed by Ray: its parent
(`cluster.ray.driver_process`), where the workers' supervisor is, starts the next one.

begin ─▶ Ray is started, or found ─▶ RayUp ─▶ calls are answered ─▶ Ray is lost: the process ends immediately
StopRay, or the parent is gone: Ray ends, then the process
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.process.channel import MessageChannel, Ping, Pong, ProcessFailed
from cluster.process.logs import FIELDS
from cluster.process.scratch_dir import kill_users
from cluster.process.signals import SIGNALS
from cluster.ray.driver_messages import (
    DRIVER_MESSAGES,
    BeginDriver,
    CancelCall,
    LogLine,
    RayAnswer,
    RayAway,
    RayCall,
    RayUp,
    StopRay,
)
from cluster.ray.ray_calls import RayCalls
from cluster.ray.ray_session import Machines
from protos.errors import BatonError, Misconfigured, Unavailable
from protos.hints import encodable
from protos.wire import error_info

AGAIN_S = 1.0  # between two checks for a Ray that was there before
LAST_WORDS_S = 1.0
EXIT_RAY_LOST = 75  # EX_TEMPFAIL of sysexits.h


class RayDriver:
    """Starts or finds Ray, and answers the parent's calls on one event loop."""

    def __init__(self, begin: BeginDriver, channel: MessageChannel) -> None:
        self._begin = begin
        self._channel = channel
        self._machines = Machines(begin.config, Path(begin.folder), begin.part)
        self._calls = RayCalls(self._machines, Path(begin.folder), begin.orphan_s)
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Runs until a stop is requested, Ray is lost, or the parent is gone. Returns the exit code."""
        self._channel.send(Pong())
        obeying, living = asyncio.create_task(self._obey()), asyncio.create_task(self._live())
        await asyncio.wait([obeying, living], return_when=asyncio.FIRST_COMPLETED)
        if obeying.done():
            living.cancel()
            await asyncio.wait([living])
            await (self._machines.stop() if obeying.result() else self._end_everything())
            return 0
        try:
            living.result()
        except BatonError as error:
            self._channel.send(ProcessFailed(error=error_info(error)))
            await self._machines.stop()
            return 1
        return EXIT_RAY_LOST

    async def _live(self) -> None:
        """Runs one Ray, from its start to its loss. Raises Misconfigured if there was never one at the address; waits
        for one that was there."""
        while True:
            try:
                await self._machines.start()
                break
            except Misconfigured as error:
                if not self._begin.was_up or not self._begin.config.address:
                    raise
                self._doubt(error.message.partition(";")[0])
                await asyncio.sleep(AGAIN_S)
            except Unavailable as error:
                self._doubt(error.message)
                return
        self._channel.send(RayUp())
        self._doubt(await self._machines.lost(self._doubt))

    def _doubt(self, reason: str) -> None:
        self._channel.send(RayAway(reason=reason))

    async def _obey(self) -> bool:
        """True if a stop was requested, False if the parent is gone."""
        while (message := await self._channel.receive()) is not None:
            match message:
                case Ping():
                    self._channel.send(Pong())
                case RayCall():
                    self._begin_answer(message)
                case CancelCall(number=number) if number in self._answering:
                    self._answering[number].cancel()
                case StopRay():
                    return True
        return False

    def _begin_answer(self, call: RayCall) -> None:
        self._answering[call.number] = task = asyncio.create_task(self._answer(call))
        task.add_done_callback(lambda _: self._answering.pop(call.number))

    async def _answer(self, call: RayCall) -> None:
        value: Any = None
        error: BatonError | None = None
        try:
            value = await self._calls.call(call.method, call.arguments)
        except BatonError as failed:
            error = failed
        except Exception as failed:  # Ray raises plain Exceptions
            error = Unavailable(f"Ray has failed: {type(failed).__name__}: {failed}")
        sent = error_info(error) if error is not None else None
        self._channel.send(RayAnswer(number=call.number, value=value, error=sent))

    async def _end_everything(self) -> None:
        """Ends Ray after the end of the parent. Ranks end by themselves, or serve the next parent."""
        folder = Path(self._begin.folder)
        if not self._begin.lock:
            await self._machines.stop()
            return
        kill_users(folder)  # Ray, too: its library may end this process at any time now
        shutil.rmtree(folder, ignore_errors=True)


class ParentLog(logging.Handler):
    """Sends log records to the parent, which writes the log."""

    def __init__(self, channel: MessageChannel) -> None:
        super().__init__()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: encodable(str(getattr(record, name))) for name in FIELDS if getattr(record, name, None)}
        message = encodable(self.format(record))
        line = LogLine(name=encodable(record.name), level=record.levelno, message=message, fields=fields)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._channel.send, line)


async def run(end: socket.socket) -> int:
    channel = await MessageChannel.over(end, DRIVER_MESSAGES)
    begin = await channel.receive()
    if not isinstance(begin, BeginDriver):
        return 1  # the parent ended before it sent anything
    logging.basicConfig(level=logging.WARNING, handlers=[ParentLog(channel)], force=True)
    logging.captureWarnings(True)
    logging.getLogger("baton").setLevel(logging.INFO)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent decides when to end
    try:
        return await RayDriver(begin, channel).run()
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.sleep(0)  # log records have been sent
                await channel.close()


async def run_and_leave(end: socket.socket) -> None:
    """Ends the process immediately: Ray's threads may never end."""
    code = 1
    try:
        code = await run(end)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """`argv`: the inherited file descriptor of the channel to the parent."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(run_and_leave(socket.socket(fileno=int(sys.argv[1]))))
