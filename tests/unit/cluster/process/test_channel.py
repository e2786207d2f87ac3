"""Messages between two processes: what is sent arrives, and bytes that are no message end the channel."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct

import pytest

from cluster.gateway.replicas import REPLICA_MESSAGES, ReplicaState
from cluster.process.channel import MessageChannel, ProcessFailed
from protos.values import ErrorInfo

STATE = ReplicaState(is_ready=True, example="curl")
PICKLE = pickle.dumps(STATE)


async def test_all_that_is_sent_arrives_and_then_the_end() -> None:
    ours, theirs = [await MessageChannel.over(end, REPLICA_MESSAGES) for end in socket.socketpair()]
    for message in (STATE, ProcessFailed(error=ErrorInfo(code="misconfigured", message="no", param="port"))):
        ours.send(message)
        assert await theirs.receive() == message
    await ours.close()
    assert await theirs.receive() is None
    await theirs.close()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!I", len(PICKLE)) + PICKLE,
        struct.pack("!I", 3) + b"\x01x\x90",
        struct.pack("!I", 2**32 - 1),
        b"\0\0\0\0",
    ],
    ids=["pickle", "unknown", "endless", "empty"],
)
async def test_a_channel_with_bytes_that_are_no_message_is_closed(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    end, stranger = socket.socketpair()
    channel = await MessageChannel.over(end, REPLICA_MESSAGES)
    with stranger:
        stranger.sendall(sent)
        assert await channel.receive() is None
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    assert [record.levelname for record in caplog.records] == ["ERROR"]
