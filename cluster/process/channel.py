"""Messages between two of Baton's processes over a stream: a length, then a value encoded by `protos.codec`."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protos.codec import Messages
from protos.errors import UnreadableMessage
from protos.values import ErrorInfo

log = logging.getLogger("baton.cluster")

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Answered with Pong, unless the process's event loop hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed:
    """The reason for which the process ends."""

    error: ErrorInfo


class MessageChannel:
    """One end of a channel. Each message is a value of a type in `messages`, by name. `send` returns immediately, and
    drops messages if the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, messages: Messages) -> None:
        self._reader = reader
        self._writer = writer
        self._messages = messages

    @classmethod
    async def over(cls, end: socket.socket, messages: Messages) -> MessageChannel:
        return cls(*await asyncio.open_unix_connection(sock=end), messages)

    @classmethod
    async def to(cls, path: str, messages: Messages) -> MessageChannel:
        """Connects to the socket at `path`. Raises OSError if no process listens."""
        return cls(*await asyncio.open_unix_connection(path), messages)

    def send(self, message: object) -> None:
        if not self._writer.is_closing():
            packed = self._messages.encode(type(message).__name__, message)
            self._writer.write(_LENGTH.pack(len(packed)) + packed)

    async def receive(self) -> Any:
        """Returns a message; None once the other side is gone or has sent bytes that cannot be decoded, which closes
        the channel."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise UnreadableMessage(
                    f"a message of {length} bytes is announced: at most {MAX_MESSAGE_BYTES} are sent"
                )
            return self._messages.decode(await self._reader.readexactly(length))[1]
        except (asyncio.IncompleteReadError, OSError):
            return None
        except UnreadableMessage as error:
            log.error("a channel between two of our processes is closed: %s", error)
            self._writer.close()
            return None

    async def flush(self) -> None:
        """Returns when sent messages have been handed to the kernel."""
        with suppress(OSError):
            await self._writer.drain()

    async def close(self) -> None:
        """Returns when sent messages have been handed to the kernel."""
        self._writer.close()
        with suppress(OSError):  # the other side is gone
            await self._writer.wait_closed()
