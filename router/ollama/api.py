"""Errors of Ollama's API, `{"error": message}`, and its streams: lines of JSON, which have no room for comments."""

from __future__ import annotations

from typing import Any

from protos.errors import BatonError
from router.http.api import Api, retry_after
from router.http.framing import json_line


def error_body(error: BatonError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Api(
    name="ollama",
    paths=("/api/",),
    error_body=error_body,
    error_event=lambda error: json_line(error_body(error) | retry_after(error)),
    keep_alive=b"",  # the response begins; a line without an answer would stop its clients
    stream_type=b"application/x-ndjson",
)
