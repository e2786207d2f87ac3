"""Channels to workers: their limits, the client certificate, and the token of the worker's run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from protos.tls import WORKER_NAME, PeerTls, token_metadata

MAX_MESSAGE_BYTES = 64 * 2**20  # a prompt of a million tokens is 4 MB; a snapshot of a million blocks is 16 MB

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that has vanished or stopped is noticed after about two seconds.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),  # this alone decides when a keepalive ping is lost; the default is 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A new client connects immediately: it does not inherit the back-off of a lost one. The fleet decides when to
    # retry.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)

OpenChannel = Callable[[str], Any]
"""Opens the channel to an address: gRPC's, or a simulator's."""


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))


class Channels:
    """Opens channels of a member of the cluster, with its certificate, if any, and the token of the worker's run.
    Raises Misconfigured for unreadable certificates."""

    def __init__(self, peers: PeerTls) -> None:
        self._credentials = peers.channel_credentials()
        self._token = peers.token
        self._tokens: dict[str, str] = {}  # by address, if they were announced with a token

    def __call__(self, address: str) -> Any:
        channel = self._open(address)
        token = self._tokens.get(address, self._token)
        return TokenChannel(channel, token) if token else channel

    def learn(self, address: str, token: str) -> None:
        if token:
            self._tokens[address] = token
        else:
            self._tokens.pop(address, None)

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return open_channel(address)
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", WORKER_NAME)]
        return grpc.aio.secure_channel(address, self._credentials, options=options)


class TokenChannel:
    """A channel whose calls send a token. It is not a gRPC interceptor, because those create a task for every call."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = token_metadata(token)

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return partial(self._channel.unary_unary(*method, **options), metadata=self._metadata)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return partial(self._channel.stream_stream(*method, **options), metadata=self._metadata)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)
