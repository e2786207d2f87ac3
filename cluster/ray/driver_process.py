"""The process with Ray's library (`cluster.ray.driver`), as the serving process sees it: started, watched, and started
again when it ends. Workers serve meanwhile.

spawn ─▶ BeginDriver ─▶ RayUp ─▶ calls and answers ─▶ it has ended: calls fail with Unavailable, spawn the next one
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cluster.config.cluster_config import SupervisionConfig
from cluster.process.channel import MessageChannel, Ping, Pong, ProcessFailed
from cluster.process.life import live, spawn
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
from cluster.supervision.lifecycle import delay_s
from protos.errors import BatonError, Unavailable
from protos.event_loop import Changed
from protos.values import ErrorInfo
from protos.wire import raised

log = logging.getLogger("baton.cluster")

Result = TypeVar("Result")

PROGRAM = "from cluster.ray.driver import main; main()"
START_TRIES = 3  # of a Ray that never started
MAX_PAUSE_S = 5.0  # before a driver that keeps ending is started again
PING_S = 2.0
DOUBT_UNANSWERED = 2
MAX_UNANSWERED = 15  # generous: no request waits for the driver, and importing Ray takes seconds
MAX_UNHEARD = 30  # times PING_S until the driver's first message
MAX_SAID_LINES = 20
ENDINGS = {"give_back", "leave", "close", "end"}  # calls, also `on_node`, that a driver carries out once it can
BEING_STARTED = "Ray is being started"


class DriverProcess:
    """Runs the driver: `run` it on one event loop. `came_up` is awaited whenever Ray is up; `clean_up` removes the rest
    of a Ray, on a thread."""

    def __init__(
        self,
        begin: BeginDriver,
        config: SupervisionConfig,
        *,
        came_up: Callable[[], Awaitable[None]],
        clean_up: Callable[[], None],
    ) -> None:
        self._begin, self._config = begin, config
        self._came_up, self._clean_up = came_up, clean_up
        self._channel: MessageChannel | None = None
        self._up = asyncio.Event()
        self._calls: dict[int, asyncio.Future[RayAnswer]] = {}
        self._num_calls = 0
        self._faults: dict[str, str] = {}
        self._since_s = 0.0
        self._num_unanswered = 0
        self._is_heard = False
        self._reason = ""  # that the driver has sent lately
        self._error: ErrorInfo | None = None
        self._stopping = False
        self._ended = asyncio.Event()  # or has not begun
        self._ended.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed = Changed()  # of `trouble`

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def fault(self) -> str:
        return "; ".join(dict.fromkeys(self._faults.values())) or ("" if self.is_up else BEING_STARTED)

    @property
    def trouble(self) -> str:
        """The fault in words for people; "" without one, and before Ray was there."""
        reason, since_s = "; ".join(dict.fromkeys(self._faults.values())), self._since_s
        if not reason and self._num_unanswered > DOUBT_UNANSWERED and self._channel is not None:
            reason = "Ray's driver does not answer"
            since_s = time.monotonic() - (self._num_unanswered - 1) * PING_S
        if not reason or not self._begin.was_up:
            return ""
        lost = "before Ray is back" if self._begin.config.address else "in another place"
        return (
            f"{reason} (for {time.monotonic() - since_s:.0f} s): workers keep serving; a lost worker is not started "
            f"{lost}"
        )

    def doubt(self, reason: str, what: str = "Ray") -> None:
        """Notes a fault of `what`; "" when it is over."""
        before = dict(self._faults)
        self._faults.pop(what, None)
        if reason:
            self._faults[what] = reason
        if self._faults == before:
            return
        if not before:
            self._since_s = time.monotonic()
        if self._begin.was_up and self._faults:
            log.warning("%s", self.trouble)
        elif self._begin.was_up:
            log.info("Ray is available, and every worker has its place in it")
        self.changed.notify()

    async def call(self, method: str, *arguments: Any, kind: type[Result], waits: bool = True) -> Result:
        """Calls a method of `RayCalls`. Waits until Ray is up, unless `waits` is False. Raises the method's BatonError,
        or Unavailable if Ray is lost or not up."""
        if not waits and self.fault:
            raise Unavailable(f"{self.fault}: try again later")
        await self._up.wait()
        channel = self._channel
        assert channel is not None, "it is up"
        self._num_calls = number = self._num_calls + 1
        answered = self._calls[number] = asyncio.get_running_loop().create_future()
        channel.send(RayCall(number=number, method=method, arguments=arguments))
        try:
            answer = await answered
        except asyncio.CancelledError:
            if ENDINGS.isdisjoint((method, *arguments[1:2])):
                channel.send(CancelCall(number=number))
            raise
        finally:
            del self._calls[number]
        if answer.error is not None:
            raise raised(answer.error)
        return msgspec.convert(answer.value, kind)

    async def run(self) -> None:
        """Runs until `stop` or `leave`. Raises the BatonError of a Ray that never started."""
        self._ended.clear()
        try:
            await self._keep_running()
        finally:
            self._ended.set()

    async def _keep_running(self) -> None:
        num_failures = 0
        while not self._stopping:
            begun_s = time.monotonic()
            reason = await self._live()
            if self._stopping:
                return
            if self._error is not None:
                raise raised(self._error)
            num_failures = 1 if time.monotonic() - begun_s > self._config.backoff_reset_s else num_failures + 1
            if not self._begin.was_up and num_failures >= START_TRIES:
                raise Unavailable(f"{reason}; tried {START_TRIES} times")
            pause_s = min(MAX_PAUSE_S, delay_s(num_failures, self._config)) if num_failures > 1 else 0.0
            what = "Ray is started again" if self._begin.was_up else (
                f"this is tried again ({num_failures + 1} of {START_TRIES})"
            )  # fmt: skip
            log.warning("%s: %s%s", reason, what, f" in {pause_s:.2g} s" if pause_s else "")
            await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        """Ends Ray and the driver, and returns when they have ended."""
        self._stopping = True
        if self._channel is not None:
            self._channel.send(StopRay())
        await self._ended.wait()

    async def leave(self) -> None:
        """Like `stop`, for workers that outlive this process."""
        self._stopping = True
        if self._channel is not None:
            await self._channel.close()
        await self._ended.wait()

    # ------------------------------------------------------------------------------------------------------------------

    async def _live(self) -> str:
        """Runs the process once. Returns why it ended."""
        stderr = Path(self._begin.folder) / "driver.err"
        try:
            with stderr.open("wb") as errors:
                process, ours = await spawn(PROGRAM, errors=errors)
        except OSError as error:  # too little memory, or too many processes or open files at the moment
            self.doubt(reason := f"Ray's driver could not be started: {error}")
            return reason
        channel = await MessageChannel.over(ours, DRIVER_MESSAGES)
        channel.send(self._begin)
        self._channel, self._is_heard, self._reason = channel, False, ""
        self._num_unanswered = MAX_UNANSWERED - MAX_UNHEARD
        if self._stopping:  # since before it was spawned
            channel.send(StopRay())
        try:
            code = await live(process, self._follow(channel), self._watch_answers(channel))
        finally:
            self._channel = None
            self._up.clear()
            await channel.close()
            for task in self._tasks:  # of this Ray
                task.cancel()
            for answered in self._calls.values():
                if not answered.done():
                    answered.set_exception(Unavailable("Ray was lost: try again later"))
        reason = self._reason or self._why_ended(code, stderr)
        if not self._stopping:
            self.doubt(reason)
        await asyncio.to_thread(self._clean_up)
        return reason

    def _why_ended(self, code: int, stderr: Path) -> str:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._num_unanswered >= MAX_UNANSWERED:
            how = f"was killed: it had not answered for {MAX_UNANSWERED * PING_S:g} s"
        elif code not in (0, -9) and (lines := stderr.read_text(errors="replace").strip().splitlines()):
            log.warning("the last lines of the stderr of Ray's driver:\n%s", "\n".join(lines[-MAX_SAID_LINES:]))
        return f"Ray's driver {how}"

    async def _watch_answers(self, channel: MessageChannel) -> None:
        """Returns when the driver does not answer pings: its event loop hangs."""
        while self._num_unanswered < MAX_UNANSWERED:
            await asyncio.sleep(PING_S)
            self._num_unanswered += 1
            if self._is_heard:
                channel.send(Ping())

    async def _follow(self, channel: MessageChannel) -> None:
        while (message := await channel.receive()) is not None:
            if not self._is_heard:
                self._is_heard, self._num_unanswered = True, 0
            match message:
                case Pong():
                    self._num_unanswered = 0
                case RayAnswer(number=number):
                    if (answered := self._calls.get(number)) is not None and not answered.done():
                        answered.set_result(message)
                case LogLine(name=name, level=level, message=line, fields=fields):
                    logging.getLogger(name).log(level, "%s", line, extra=fields)
                case RayAway(reason=reason):
                    self._reason = reason
                    self.doubt(reason)
                case RayUp():
                    self._begin = replace(self._begin, was_up=True)
                    self._up.set()
                    task = asyncio.create_task(self._settle())
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case ProcessFailed(error=error):
                    self._error = error

    async def _settle(self) -> None:
        """Reserves the workers' places once Ray is back."""
        try:
            await self._came_up()
        except BatonError as error:
            log.warning("the workers' places are not reserved: %s", error.message)
        if self.is_up:
            self.doubt("")
