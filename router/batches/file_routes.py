"""OpenAI's Files: /v1/files. The storage, cursors and limits of lists are those of the routes of batches, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from protos.errors import Cancelled, InvalidRequest, NotFound, PayloadTooLarge
from router.files.batch_storage import BatchStorage
from router.files.contents import failing
from router.files.records import UPLOADED, Api, PageAsked, StoredBatch, StoredFile, new_id
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Body, Query, parse_body
from router.http.middleware import header_of, tenant_of

MAX_LIMIT, MAX_LISTED = 100, 10_000


def storage_of(gateway: Gateway) -> BatchStorage:
    """Raises NotFound."""
    if gateway.batches is None:
        raise NotFound(
            "This gateway keeps no files and runs no batches: start it with --set router.batch.folder=FOLDER"
        )
    return gateway.batches


class ListQuery(Query):
    limit: int = Field(default=20, ge=1, le=MAX_LIMIT, description=f"an integer between 1 and {MAX_LIMIT}")
    after: str | SkipJsonSchema[None] = Field(default=None, min_length=1, description="the id of an entry")
    order: Literal["asc", "desc"] = Field(default="desc", description="asc or desc")

    def page(self, **filters: Any) -> PageAsked:
        return PageAsked(limit=self.limit, after=self.after, ascending=self.order == "asc", filters=filters)


class FileListQuery(ListQuery):
    limit: int = Field(default=MAX_LISTED, ge=1, le=MAX_LISTED, description=f"an integer between 1 and {MAX_LISTED}")
    purpose: str | SkipJsonSchema[None] = Field(default=None, description="a string")


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


async def batch_page(gateway: Gateway, request: Request, asked: PageAsked) -> tuple[list[StoredBatch], bool]:
    """Batches of the request's tenant, and whether more follow. Raises InvalidRequest."""
    return await asyncio.to_thread(storage_of(gateway).batches.page, tenant_of(request).name, asked)


MAX_PARTS = 16
"""Files and fields of a form, of which Starlette counts each kind."""
KEPT_S = 30 * 86_400
"""A file of a batch's input is kept for so long, unless its upload has another time."""
EXPIRY_S = (3600, 2_592_000)
EXPIRY = f"an integer between {EXPIRY_S[0]} and {EXPIRY_S[1]}"
_CHUNK_BYTES = 1 << 18


class UploadForm(Body):
    """The parts of an upload's form, whose fields are texts."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: Annotated[UploadFile, WithJsonSchema({"type": "string", "format": "binary"})] = Field(
        description="a file of JSON lines, with its name"
    )
    purpose: Literal["batch"] = Field(description="batch: files are for batches here")
    anchor: Literal["created_at"] = Field(default="created_at", alias="expires_after[anchor]", description="created_at")
    seconds: int = Field(
        default=KEPT_S, alias="expires_after[seconds]", strict=False, ge=EXPIRY_S[0], le=EXPIRY_S[1], description=EXPIRY
    )


async def upload_file(gateway: Gateway, request: Request) -> Response:
    storage, kind = storage_of(gateway), header_of(request.scope, b"content-type")
    if not kind.lower().startswith("multipart/form-data"):
        raise InvalidRequest(
            f"The body comes with 'Content-Type: {kind[:80]}': send a file as multipart/form-data, "
            "as `curl -F purpose=batch -F file=@requests.jsonl` does"
        )
    try:
        with failing():
            async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS) as sent:
                return json_response(file_body(await _stored(storage, tenant_of(request).name, sent)))
    except ClientDisconnect:
        raise Cancelled("the client went away while sending its file") from None


async def _stored(storage: BatchStorage, tenant: str, sent: FormData) -> StoredFile:
    """Raises InvalidRequest, and PayloadTooLarge."""
    fields: dict[str, Any] = {}
    for name, value in sent.multi_items():
        if name in fields:
            raise InvalidRequest(f"The form has '{name[:60]}' twice: send it once", param=name[:60])
        fields[name] = value
    form = parse_body(fields, UploadForm)
    num_bytes = form.file.size or 0
    if num_bytes > storage.max_file_bytes:
        raise PayloadTooLarge(f"The file is too large: at most {storage.max_file_bytes} bytes are stored", param="file")
    now, file_id = storage.clock(), new_id("file-")
    await asyncio.to_thread(storage.files.contents.store, file_id, form.file.file)
    file = StoredFile(
        id=file_id, tenant=tenant, filename=(form.file.filename or "upload")[:255], purpose=UPLOADED, bytes=num_bytes,
        created_s=now, expires_s=now + form.seconds,
    )  # fmt: skip
    await asyncio.to_thread(storage.files.add, file)
    return file


async def list_files(gateway: Gateway, request: Request, asked: FileListQuery) -> Response:
    filters = {"is_hidden": 0} | ({"purpose": asked.purpose} if asked.purpose is not None else {})
    page = storage_of(gateway).files.page
    found, has_more = await asyncio.to_thread(page, tenant_of(request).name, asked.page(**filters))
    return json_response(list_body([file_body(file) for file in found], has_more=has_more))


async def retrieve_file(gateway: Gateway, request: Request) -> Response:
    return json_response(file_body(await _file(storage_of(gateway), request)))


async def delete_file(gateway: Gateway, request: Request) -> Response:
    storage, file_id = storage_of(gateway), request.path_params["file_id"]
    await asyncio.to_thread(storage.files.delete, tenant_of(request).name, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def file_content(gateway: Gateway, request: Request) -> Response:
    storage = storage_of(gateway)
    return await content_response(storage, await _file(storage, request))


async def content_response(storage: BatchStorage, file: StoredFile) -> Response:
    """The content, read while it is sent."""

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, file.bytes, _CHUNK_BYTES):
            yield await asyncio.to_thread(storage.files.contents.read, file.id, start, _CHUNK_BYTES)

    await asyncio.to_thread(storage.files.contents.read, file.id, 0, 1)  # an error before the response begins
    kind = "application/x-jsonl" if file.is_hidden else "application/octet-stream"
    return StreamingResponse(parts(), media_type=kind, headers={"content-length": str(file.bytes)})


async def _file(storage: BatchStorage, request: Request) -> StoredFile:
    tenant = tenant_of(request).name
    return await asyncio.to_thread(storage.files.find, tenant, request.path_params["file_id"])


def file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "expires_at": None if file.expires_s is None else int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_body(entries: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }
