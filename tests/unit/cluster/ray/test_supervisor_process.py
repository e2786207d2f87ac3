"""What the supervisor's process sends its parent. Nothing here starts Ray."""

from __future__ import annotations

import asyncio
import logging
import socket

from cluster.process.channel import MessageChannel
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES
from cluster.ray.supervisor_process import ParentLog


async def test_a_line_that_utf_8_cannot_encode_reaches_the_parent() -> None:
    """The name of a file may be such. The line was lost."""
    ours, theirs = socket.socketpair()
    supervisor, parent = (
        await MessageChannel.over(ours, SUPERVISOR_MESSAGES),
        await MessageChannel.over(theirs, SUPERVISOR_MESSAGES),
    )
    log = ParentLog(supervisor)
    for message in ("\udcff is read", "done"):
        record = logging.LogRecord("baton", logging.INFO, __file__, 1, message, None, None)
        record.worker = "decode-\udcff"
        log.handle(record)
    async with asyncio.timeout(60):
        lines = [await parent.receive(), await parent.receive()]
    assert [line.message for line in lines] == [r"\udcff is read", "done"]
    assert lines[0].fields == {"worker": r"decode-\udcff"}
    await supervisor.close()
    await parent.close()
