"""An error keeps its type, its message, its parameter and its advice when it crosses an RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import errors
from protos.grpc_status import CODE_KEY, abort_with, error_of, in_words


class Refusals:
    """A one-method service that ends every call with the exception it is told to."""

    def __init__(self) -> None:
        self.error: BaseException = errors.Internal("unset")

    async def refuse(self, request: bytes, context: Any) -> bytes:
        await abort_with(context, self.error)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Refusals, grpc.aio.Channel]]:
    service = Refusals()
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(service.refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Refuse": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, channel
    await server.stop(None)


async def refused(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await channel.unary_unary("/t.T/Refuse", bytes, bytes)(b"")
    return failed.value


async def test_every_error_crosses_with_its_type_and_words(served: tuple[Refusals, grpc.aio.Channel]) -> None:
    service, channel = served
    for code, kind in errors.ERRORS_BY_CODE.items():
        service.error = kind("größer als erlaubt", param="max_tokens", retry_after_s=1.5)
        failed = await refused(channel)
        error = error_of(failed)
        assert failed.code() is kind.grpc_status
        trailing: Any = failed.trailing_metadata()
        assert (CODE_KEY, code) in tuple(trailing)
        assert type(error) is errors.ERRORS_BY_CODE[code]
        assert (error.message, error.param, error.retry_after_s) == ("größer als erlaubt", "max_tokens", 1.5)


async def test_a_bug_arrives_as_internal_with_a_long_message(
    served: tuple[Refusals, grpc.aio.Channel],
) -> None:
    service, channel = served
    service.error = ValueError("x")
    assert isinstance(error_of(await refused(channel)), errors.Internal)
    service.error = errors.InvalidRequest("ü" * 100_000, param="p" * 100_000)
    error = error_of(await refused(channel))
    assert isinstance(error, errors.InvalidRequest)
    assert error.message == "ü" * len(error.message)


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        error = error_of(await refused(channel))
    assert isinstance(error, errors.Unavailable)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("last error: UNKNOWN: ipv4:127.0.0.1:1: connect: Connection refused (111)", "nothing listens there"),
        ("DNS resolution failed for nowhere:1: C-ares status is not ARES_SUCCESS: timeout", "the name of its host"),
        ("connection attempt timed out before receiving SETTINGS frame", "it does not answer"),
        ("keepalive ping timeout", "it does not answer"),
        ("recvmsg:Connection reset by peer", "it hung up"),
        ("something that grpc has never said before", "something that grpc has never said before"),
    ],
)
def test_a_connections_state_is_described_in_words(said: str, told: str) -> None:
    assert in_words(said).startswith(told)
