"""OpenAI's Files: /v1/files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from protos.errors import Cancelled, InvalidRequest, PayloadTooLarge
from router.batches.asked import page_asked, storage_of
from router.batches.multipart import FormPart, MultipartReader, PartContent, boundary_of
from router.files.contents import ContentWriter
from router.files.records import UPLOADED, StoredFile, new_id
from router.files.storage import BatchStorage
from router.gateway import Gateway
from router.http.errors import json_response
from router.http.middleware import header_of, tenant_of

MAX_FIELD_BYTES = 1024
MAX_LISTED = 10_000
KEPT_S = 30 * 86_400.0
"""A file of a batch's input is kept for so long, unless its upload has another time."""
EXPIRY_S = (3600, 2_592_000)
_CHUNK_BYTES = 1 << 18
_WRITE_BYTES = 1 << 20
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


async def upload_file(gateway: Gateway, request: Request) -> Response:
    storage = storage_of(gateway)
    reader = MultipartReader(boundary_of(header_of(request.scope, b"content-type")))
    file_id = new_id("file-")
    writer = await asyncio.to_thread(storage.files.contents.writer, file_id)
    with writer:
        form = _UploadForm(writer, storage.max_file_bytes)
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client went away while sending its file")
            for part in reader.feed(message.get("body", b"")):
                form.add(part)
            if form.is_full:
                await asyncio.to_thread(form.flush)
            if not message.get("more_body", False):
                break
        if not reader.ended:
            raise InvalidRequest("The form's body ends before its last boundary: send all of it")
        lifetime_s = form.check()
        await asyncio.to_thread(form.flush)
        await asyncio.to_thread(writer.commit)
    now = storage.clock()
    file = StoredFile(
        id=file_id, tenant=tenant_of(request).name, filename=form.filename or "upload", purpose=UPLOADED,
        bytes=form.num_bytes, created_s=now, expires_s=now + lifetime_s,
    )  # fmt: skip
    await asyncio.to_thread(storage.files.add, file)
    return json_response(file_body(file))


class _UploadForm:
    """The fields of an upload, and its file on the way to the disk."""

    def __init__(self, writer: ContentWriter, max_bytes: int) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._fields: dict[str, bytearray] = {}
        self._field: bytearray | None = None
        self._pending = bytearray()
        self.filename: str | None = None
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= _WRITE_BYTES

    def add(self, part: FormPart | PartContent) -> None:
        """Raises InvalidRequest."""
        if isinstance(part, PartContent):
            if self._field is not None:
                self._field += part.data
                if len(self._field) > MAX_FIELD_BYTES:
                    raise InvalidRequest(f"A field of the form has more than {MAX_FIELD_BYTES} bytes: only 'file' may")
                return
            self.num_bytes += len(part.data)
            if self.num_bytes > self._max_bytes:
                raise PayloadTooLarge(
                    f"The file is too large: at most {self._max_bytes} bytes are stored", param="file"
                )
            self._pending += part.data
        elif part.name == "file":
            if self.filename is not None:
                raise InvalidRequest("The form has two files: send one", param="file")
            self.filename, self._field = (part.filename or "upload")[:255], None
        elif part.name in _FIELDS:
            self._field = self._fields[part.name] = bytearray()
        else:
            raise InvalidRequest(
                f"Unknown parameter: '{part.name[:60]}': a file has {', '.join(('file', *_FIELDS))}",
                param=part.name[:60],
            )

    def flush(self) -> None:
        self._writer.write(bytes(self._pending))
        self._pending.clear()

    def check(self) -> float:
        """Seconds until it expires. Raises InvalidRequest."""
        given = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if self.filename is None:
            raise InvalidRequest("Missing required parameter: 'file'.", param="file")
        if "purpose" not in given:
            raise InvalidRequest("Missing required parameter: 'purpose'.", param="purpose")
        if given["purpose"] != UPLOADED:
            raise InvalidRequest(
                f"'purpose' is {given['purpose'][:60]!r}: it must be {UPLOADED}, files are for batches here",
                param="purpose",
            )
        if given.get(_ANCHOR, "created_at") != "created_at":
            raise InvalidRequest(f"'{_ANCHOR}' must be created_at", param=_ANCHOR)
        if _SECONDS not in given:
            return KEPT_S
        low, high = EXPIRY_S
        seconds = given[_SECONDS]
        if not re.fullmatch(r"[0-9]{1,9}", seconds) or not low <= int(seconds) <= high:
            raise InvalidRequest(
                f"'{_SECONDS}' is {seconds[:40]!r}: it must be an integer between {low} and {high}", param=_SECONDS
            )
        return float(seconds)


async def list_files(gateway: Gateway, request: Request) -> Response:
    storage = storage_of(gateway)
    asked = page_asked(request, most=MAX_LISTED, default=MAX_LISTED)
    purpose = request.query_params.get("purpose")
    filters: dict[str, Any] = {"is_hidden": 0} | ({"purpose": purpose} if purpose is not None else {})
    found, has_more = await asyncio.to_thread(
        storage.files.page, tenant_of(request).name, replace(asked, filters=filters)
    )
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
