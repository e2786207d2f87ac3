"""Errors as responses, in the form of the client's API."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from protos.errors import BatonError, BudgetExhausted, Internal, RequestTimeout, Unauthenticated
from router.http.api import OPENAI, Api, retry_after


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
