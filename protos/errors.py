"""Every error Baton raises for a reason outside its own code, with its gRPC status and its HTTP code.

BatonError
├── InvalidRequest            INVALID_ARGUMENT     400   the caller can mend it: names the parameter
│   ├── UnsupportedParameter                       400   documented by the API, not offered here
│   ├── ContextLengthExceeded                      400   prompt + answer do not fit
│   ├── PayloadTooLarge                            413
│   ├── HeadersTooLarge                            431
│   ├── UnsupportedMediaType                       415
│   └── RequestTimeout                             408   it was not sent to its end in time
├── NotFound                  NOT_FOUND            404
│   ├── UnknownModel
│   └── UnknownRequest
├── Unauthenticated           UNAUTHENTICATED      401   no key, or none that is known here
├── Forbidden                 PERMISSION_DENIED    403   the key is not for this
├── Overloaded                RESOURCE_EXHAUSTED   429   try again after `retry_after_s`
│   └── RateLimited                                      the tenant has used what it may
├── Unavailable               UNAVAILABLE          503   try again: nothing was wrong with the request
│   ├── NoWorkers                                        a pool has no live worker
│   ├── WorkerLost                                       the worker died with the request on it
│   ├── WorkerDraining                                   the worker takes no new work
│   ├── AdapterNotLoaded                                 the worker has not, or not any more, the request's adapter
│   ├── RevisionReplaced                                 a roll has replaced the model that its answer began with
│   └── TransferFailed                                   KV did not arrive: lane lost, ticket expired or fenced
│       └── TransferCorrupted                            what arrived is not what was sent
├── DeadlineExceeded          DEADLINE_EXCEEDED    504
├── Cancelled                 CANCELLED            499   the client went away
├── Misconfigured             FAILED_PRECONDITION  500   found at start-up, before any work is taken
│   ├── UnsupportedModel                                 checkpoint or option this engine does not serve
│   ├── BadCheckpoint                                    files missing, truncated or contradictory
│   └── IncompatibleWorkers                              layouts, dtypes or models that cannot be paired
└── Internal                  INTERNAL             500   a bug of ours
    ├── RequestKillsWorkers                              it was on several workers when they died: not tried again
    ├── NotFinite                                        the model overflowed for this request
    └── UnreadableMessage                                one of our processes got bytes that are no message of ours"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from grpc import StatusCode


class BatonError(Exception):
    """Root of the tree. `code` is stable and machine readable; the message is for people."""

    code: ClassVar[str] = "internal_error"
    grpc_status: ClassVar[StatusCode] = StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    code = "invalid_request"
    grpc_status = StatusCode.INVALID_ARGUMENT
    http_status = 400


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"
    http_status = 413


class HeadersTooLarge(InvalidRequest):
    code = "headers_too_large"
    http_status = 431


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


class RequestTimeout(InvalidRequest):
    code = "request_timeout"
    http_status = 408


class NotFound(BatonError):
    code = "not_found"
    grpc_status = StatusCode.NOT_FOUND
    http_status = 404


class UnknownModel(NotFound):
    code = "model_not_found"


class UnknownRequest(NotFound):
    code = "request_not_found"


class Unauthenticated(BatonError):
    code = "invalid_api_key"
    grpc_status = StatusCode.UNAUTHENTICATED
    http_status = 401


class Forbidden(BatonError):
    code = "permission_denied"
    grpc_status = StatusCode.PERMISSION_DENIED
    http_status = 403


class Overloaded(BatonError):
    code = "overloaded"
    grpc_status = StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


class BudgetExhausted(RateLimited):
    """Another request soon would be refused, too."""

    code = "insufficient_quota"


class Unavailable(BatonError):
    code = "unavailable"
    grpc_status = StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class NoWorkers(Unavailable):
    code = "no_workers"


class WorkerLost(Unavailable):
    code = "worker_lost"


class WorkerDraining(Unavailable):
    code = "worker_draining"


class AdapterNotLoaded(Unavailable):
    code = "adapter_not_loaded"


class RevisionReplaced(Unavailable):
    code = "revision_replaced"


class TransferFailed(Unavailable):
    code = "transfer_failed"


class TransferCorrupted(TransferFailed):
    code = "transfer_corrupted"


class DeadlineExceeded(BatonError):
    code = "deadline_exceeded"
    grpc_status = StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(BatonError):
    code = "cancelled"
    grpc_status = StatusCode.CANCELLED
    http_status = 499


class Misconfigured(BatonError):
    code = "misconfigured"
    grpc_status = StatusCode.FAILED_PRECONDITION


class UnsupportedModel(Misconfigured):
    code = "unsupported_model"


class BadCheckpoint(Misconfigured):
    code = "bad_checkpoint"


class IncompatibleWorkers(Misconfigured):
    code = "incompatible_workers"


class Internal(BatonError):
    code = "internal_error"


class RequestKillsWorkers(Internal):
    code = "request_kills_workers"


class NotFinite(Internal):
    code = "not_finite"


class UnreadableMessage(Internal):
    code = "unreadable_message"


def _tree(root: type[BatonError]) -> dict[str, type[BatonError]]:
    types = {root.code: root}
    for child in root.__subclasses__():
        types |= _tree(child)
    return types


ERRORS_BY_CODE: dict[str, type[BatonError]] = _tree(BatonError) | {Internal.code: Internal}


def code_of(error: BaseException) -> str:
    """The code of the error that ended a request. Any other exception is a bug of ours, or a client that went away."""
    if isinstance(error, BatonError):
        return error.code
    return Cancelled.code if isinstance(error, asyncio.CancelledError | GeneratorExit) else Internal.code


def error_from_code(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> BatonError:
    """The typed error for a code that came over the wire; an unknown code (a newer peer) becomes `Internal`."""
    return ERRORS_BY_CODE.get(code, Internal)(message, param=param, retry_after_s=retry_after_s)
