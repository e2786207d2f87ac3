"""The router's benchmark counts every event of a stream, wherever a read ends."""

from __future__ import annotations

import socket

import pytest

from benchmarks.gateway.router import read_streams
from router.streaming.token_sink import compiled

ROOM = 65536
"""Bytes that `benchmarks/gateway/streams.c` reads at once."""


@pytest.mark.skipif(compiled() is None, reason="needs a C compiler")
@pytest.mark.parametrize("num_before", range(12))
def test_an_event_that_comes_in_two_reads_is_counted_once(num_before: int) -> None:
    """The first read ends within the last event."""
    last = b"data: \n0\r\n\r\n"
    first = b"data: ".ljust(ROOM - num_before, b"x")
    here, there = socket.socketpair()
    with here, there:
        there.sendall(first + last)
        assert read_streams([here]) == 2
