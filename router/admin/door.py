"""The moments in queries of /admin."""

from __future__ import annotations

from starlette.requests import Request

from protos.errors import InvalidRequest
from router.faces.endpoint import Schema
from router.observe.ledger.organization import LATEST_S

SECOND: Schema = {"type": "integer", "minimum": 0, "maximum": LATEST_S}


def seconds_of(request: Request, name: str, default: int) -> int:
    """Whole seconds since 1970. Raises InvalidRequest."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 12 or int(value) > LATEST_S:
        raise InvalidRequest(f"{name}={value[:40]}: give whole seconds since 1970", param=name)
    return int(value)
