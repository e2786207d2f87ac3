"""Typed errors <-> gRPC statuses: the one place where an error of `protos.errors` becomes an RPC's end, and back.

The status is the kind, its details are the message, and the trailing metadata carry the error exactly: `baton-code`
for people and foreign clients, `baton-error-bin` (a serialised ErrorInfo) for our own.
"""

from __future__ import annotations

import logging
import re
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from protos import worker_pb2
from protos.errors import BatonError, Cancelled, DeadlineExceeded, Internal, InvalidRequest, Unavailable
from protos.values import ErrorInfo
from protos.wire import error_info, from_proto, raised, to_proto

log = logging.getLogger("baton.rpc")

CODE_KEY = "baton-code"
ERROR_KEY = "baton-error-bin"
MAX_TEXT_BYTES = 1000  # gRPC refuses trailing metadata of more than 8 KiB, and percent-encodes the details

# Statuses with which gRPC itself ends a call, without a Baton peer.
_FOREIGN: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,  # a message over the size limit: sending it again cannot help
}

# gRPC's texts for failed connections; the first match counts.
_CONNECTIONS = {
    "Connection refused": "nothing listens there (connection refused)",
    "DNS|[Dd]omain name|Name or service": "the name of its host could not be looked up",
    "No route to host|unreachable": "no network leads to its host",
    "[Tt]ime(d )?out|FD Shutdown": "it does not answer",
    "Socket closed|reset|RST_STREAM|Cancelling all calls|GOAWAY|Broken pipe|recvmsg|Endpoint closing": "it hung up",
}


async def abort_with(context: Any, error: BaseException) -> NoReturn:
    """Ends an RPC with `error`: call it in a servicer's method; `context` is grpc.aio's ServicerContext.

    An exception that is not of our tree is logged and crosses as Internal. Never returns: raises grpc's AbortError.
    """
    if not isinstance(error, BatonError):
        log.error("a call failed: internal error", exc_info=error)
    known = error_info(error)
    info = ErrorInfo(
        code=known.code,
        message=_shortened(known.message),
        param=_shortened(known.param),
        retry_after_s=known.retry_after_s,
    )
    metadata = ((CODE_KEY, info.code), (ERROR_KEY, to_proto(info).SerializeToString()))
    await context.abort(raised(info).grpc_status, info.message, metadata)
    raise AssertionError("abort raises")


def peer_error(failed: grpc.RpcError) -> BatonError | None:
    """The error with which a Baton peer ended the call; None if it sent none: the connection was lost, or it
    crashed."""
    for key, value in _trailing(failed):
        if key == ERROR_KEY:
            try:
                return raised(from_proto(ErrorInfo, worker_pb2.ErrorInfo.FromString(bytes(value))))
            except DecodeError:
                return None
    return None


def error_of(failed: grpc.RpcError) -> BatonError:
    """The typed error a call ended with. Without a Baton peer's word, a lost connection is `Unavailable`."""
    if (error := peer_error(failed)) is not None:
        return error
    code, details = _status(failed)
    return _FOREIGN.get(code, Internal)(details or code.name)


def in_words(details: str) -> str:
    """Describes a connection's state; gRPC's own text if it is unknown."""
    return next((explanation for sign, explanation in _CONNECTIONS.items() if re.search(sign, details)), details)


def _shortened(text: str) -> str:
    return text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def _trailing(failed: Any) -> tuple[tuple[str, Any], ...]:
    trailing = getattr(failed, "trailing_metadata", None)
    return tuple(trailing() or ()) if trailing is not None else ()


def _status(failed: Any) -> tuple[grpc.StatusCode, str]:
    if not isinstance(failed, grpc.Call | grpc.aio.AioRpcError):
        return grpc.StatusCode.UNKNOWN, str(failed)
    return failed.code(), failed.details() or ""
