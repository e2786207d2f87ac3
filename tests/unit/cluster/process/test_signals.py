"""The first signal asks for an orderly stop, the second for one at once; what runs has cleaned up in both cases."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from cluster.process.logs import JsonHandler, LogConsole, TextHandler
from cluster.process.signals import SIGNALS, StopSignal


@pytest.fixture
async def stop() -> AsyncIterator[StopSignal]:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests are run under nohup
    yield StopSignal()
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
    signal.signal(signal.SIGHUP, hangup)


class Work:
    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cleaned_up = False

    async def run(self) -> None:
        try:
            self.began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True


async def test_one_signal_ends_the_work_but_not_the_patience(stop: StopSignal) -> None:
    work, cleaning = Work(), Work()
    serving = asyncio.create_task(stop.before(work.run()))
    await work.began.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving is False
    assert work.cleaned_up

    stopping = asyncio.create_task(stop.patiently(cleaning.run()))
    await cleaning.began.wait()
    assert not stop.forced.is_set()
    os.kill(os.getpid(), signal.SIGINT)
    assert await stopping is False
    assert cleaning.cleaned_up


async def test_work_that_ends_returns_its_error(stop: StopSignal) -> None:
    assert await stop.before(asyncio.sleep(0)) is True

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await stop.before(fail())


@pytest.mark.parametrize("handler", [TextHandler, JsonHandler])
async def test_a_log_that_nobody_reads_any_more_stops_it_in_order(
    stop: StopSignal, handler: type[TextHandler | JsonHandler]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        to: Console = LogConsole(file=file)
        log = handler(to)
        for line in ("is ready", "stopping", "stopped"):
            log.emit(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
        await stop.requested.wait()
        await asyncio.sleep(0)
        assert not stop.forced.is_set()
        print("said by others", file=file, flush=True)


async def test_a_dead_log_reader_leaves_the_grace_period(stop: StopSignal) -> None:
    """`baton up 2>&1 | tee log`: the terminal sends Ctrl-C to both."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        log = TextHandler(LogConsole(file=file))
        os.close(reading)
        signal.raise_signal(signal.SIGINT)
        await stop.requested.wait()
        stop.requested.clear()
        log.emit(logging.makeLogRecord({"msg": "stopping", "levelno": logging.INFO}))
        heard = [asyncio.create_task(event.wait()) for event in (stop.requested, stop.forced)]
        await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
        assert not stop.forced.is_set()
        heard[1].cancel()
        signal.raise_signal(signal.SIGINT)
        await stop.forced.wait()
