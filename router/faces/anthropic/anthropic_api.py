"""The endpoints of Anthropic's Messages API, and its errors: `{"type": "error", "error": {"type", "message"}}`, with
that API's types and statuses."""

from __future__ import annotations

from typing import Any

from protos.errors import BatonError, ContextLengthExceeded, Overloaded, RateLimited, Unavailable
from router.faces.anthropic.messages import count_tokens, messages
from router.faces.anthropic.messages_body import MessagesBody, PromptBody
from router.faces.endpoint import Endpoint, Face
from router.http.api import Api, retry_after
from router.http.framing import named_event

OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_status(error: BatonError) -> int:
    """429 is for a tenant's own limits; where the server has no room, this API has 529."""
    if isinstance(error, Unavailable) or (isinstance(error, Overloaded) and not isinstance(error, RateLimited)):
        return OVERLOADED
    return error.http_status


def error_body(error: BatonError) -> dict[str, Any]:
    """Writes an error as this API does. Its clients shorten a conversation when they read "prompt is too long"."""
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = Api(
    name="anthropic",
    paths=("/v1/messages",),
    error_body=error_body,
    error_event=lambda error: named_event({"type": "error", "error": error_body(error)["error"] | retry_after(error)}),
    error_status=error_status,
    keep_alive=named_event({"type": "ping"}),
    id_header=b"request-id",
    key_header=b"x-api-key",
    mark=b"anthropic-version",
)

ANTHROPIC_FACE = Face(
    api=ANTHROPIC,
    endpoints=(
        Endpoint(
            "POST", "/v1/messages", messages,
            "An answer to a conversation, whole or as events, in the form of Anthropic's Messages API",
            track="messages", body=MessagesBody,
        ),
        Endpoint(
            "POST", "/v1/messages/count_tokens", count_tokens, "How many tokens a conversation has", body=PromptBody
        ),
    ),
)  # fmt: skip
