"""An HTTP API's own part of every answer: the form of errors, events and streams, and names of headers.

path ──▶ `RequestId` (the outermost layer) ──▶ scope["state"]["api"] ──▶ `api_of`: middleware, routes, `EventStream`"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from protos.errors import BatonError, BudgetExhausted, Internal, RequestTimeout, Unauthenticated


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def named_event(content: Mapping[str, Any]) -> bytes:
    """The event has the name of its `type`."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))


def json_line(content: Any) -> bytes:
    return orjson.dumps(content) + b"\n"


_TYPES = {429: "rate_limit_error", 499: "cancelled", 504: "timeout_error"}


def _status(error: BatonError) -> int:
    return error.http_status


def retry_after(error: BatonError) -> dict[str, int]:
    """Whole seconds until a retry, for an error in a stream, whose headers have been sent; empty without a time."""
    return {} if error.retry_after_s is None else {"retry_after": max(1, math.ceil(error.retry_after_s))}


def _openai_error(error: BatonError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = _TYPES.get(error.http_status, "server_error" if error.http_status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """`paths`: the beginnings of its paths.

    - `error_body`, `error_event`: an error as a response's JSON, and as the last event of a stream
    - `keep_alive`: what a silent stream sends, which clients pass over
    - `id_header`: also has the request's id, beside `x-baton-request-id`; empty: no other
    - `key_header`: may have the API key, where there is no `Authorization`; empty: no other
    - `mark`: a header that its clients send, also to paths of OpenAI's; empty: they have none
    - `model_tag`: its clients add this to a model's name without a tag
    """

    name: str
    paths: tuple[str, ...]
    error_body: Callable[[BatonError], dict[str, Any]]
    error_event: Callable[[BatonError], bytes]
    error_status: Callable[[BatonError], int] = _status
    keep_alive: bytes = b": the answer is on its way\n\n"
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    id_header: bytes = b""
    key_header: bytes = b""
    mark: bytes = b""
    model_tag: str = ""


OPENAI = Api(
    name="openai",
    paths=("/",),
    error_body=_openai_error,
    error_event=lambda error: event({"error": _openai_error(error)["error"] | retry_after(error)}),
    id_header=b"x-request-id",  # its client's `_request_id`
    key_header=b"x-api-key",  # Anthropic's client lists models below OpenAI's paths
)
"""Every path that is no other API's."""
SHARED = "/v1/models"
"""Several APIs have paths that begin so: a request is for the API whose `mark` it carries."""


def find_api(apis: Sequence[Api], scope: Scope) -> Api:
    path: str = scope["path"]
    if path.startswith(SHARED):
        names = {name for name, _ in scope["headers"]}
        return next((api for api in apis if api.mark in names), OPENAI)
    return next((api for api in apis if path.startswith(api.paths)), OPENAI)


def api_of(scope: Scope) -> Api:
    """The API of a request; OpenAI's outside of `RequestId`."""
    found = scope.get("state", {}).get("api", OPENAI)
    assert isinstance(found, Api)
    return found


def error_response(error: BatonError, api: Api = OPENAI) -> Response:
    """Retry-After is in whole seconds, and in milliseconds for openai's client. A 408 closes the connection; clients
    do not repeat what costs more than the budget."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(retry_after(error)["retry_after"])
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BudgetExhausted):
        headers["x-should-retry"] = "false"
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    return json_response(api.error_body(error), status=api.error_status(error), headers=headers)


def internal_error() -> Internal:
    """The client's answer for an internal error: the log has the details."""
    return Internal("The server failed on this request; the request id finds the cause in its log")


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")
