"""Shared by the routes of files and batches: the storage, and a list's cursor and limit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from protos.errors import InvalidRequest, NotFound
from router.files.batch_storage import BatchStorage
from router.files.records import Api, PageAsked, StoredBatch
from router.gateway import Gateway
from router.http.middleware import tenant_of

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


async def batch_of(gateway: Gateway, request: Request, api: Api) -> StoredBatch:
    """The batch that the path names. Raises NotFound."""
    tenant, batch_id = tenant_of(request).name, request.path_params["batch_id"]
    return await asyncio.to_thread(storage_of(gateway).batches.find, tenant, batch_id, api)


async def cancelled_batch(gateway: Gateway, request: Request, api: Api) -> StoredBatch:
    """Cancels the batch that the path names; its owner ends it. Raises NotFound, InvalidRequest."""
    storage, tenant = storage_of(gateway), tenant_of(request).name
    batch = await asyncio.to_thread(storage.batches.cancel, tenant, request.path_params["batch_id"], api)
    storage.changed.set()
    return batch


async def batch_page(gateway: Gateway, request: Request, api: Api, **limits: Any) -> tuple[list[StoredBatch], bool]:
    """Batches of the request's tenant, and whether more follow. Raises InvalidRequest."""
    asked = replace(page_asked(request, **limits), filters={"api": api})
    return await asyncio.to_thread(storage_of(gateway).batches.page, tenant_of(request).name, asked)
