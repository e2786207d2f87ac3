"""Shared by the routes of files and batches: the storage, and a list's cursor and limit."""

from __future__ import annotations

from starlette.requests import Request

from protos.errors import InvalidRequest, NotFound
from router.files.batch_storage import BatchStorage
from router.files.records import PageAsked
from router.gateway import Gateway

MAX_LIMIT = 100


def storage_of(gateway: Gateway) -> BatchStorage:
    """Raises NotFound."""
    if gateway.batches is None:
        raise NotFound(
            "This gateway keeps no files and runs no batches: start it with --set router.batch.folder=FOLDER"
        )
    return gateway.batches


def page_asked(request: Request, *, most: int = MAX_LIMIT, default: int = 20, before: str = "") -> PageAsked:
    """`before`: the name of the cursor that pages backwards, for an API that has one. Raises InvalidRequest."""
    asked = request.query_params
    limit, order = asked.get("limit", str(default)), asked.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 6 or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"'limit' is {limit[:40]!r}: it must be an integer between 1 and {most}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' is {order[:40]!r}: it must be asc or desc", param="order")
    names = ("after_id" if before else "after", before)
    return PageAsked(
        limit=int(limit),
        after=asked.get(names[0]),
        before=asked.get(before) if before else None,
        names=names,
        ascending=order == "asc",
    )
