"""OpenAI's Files: /v1/files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from protos.errors import Cancelled, InvalidRequest, PayloadTooLarge
from router.batches.asked import page_asked, storage_of
from router.files.batch_storage import BatchStorage
from router.files.contents import ContentWriter
from router.files.records import UPLOADED, StoredFile, new_id
from router.gateway import Gateway
from router.http.error_responses import json_response
from router.http.middleware import header_of, tenant_of

MAX_BOUNDARY_BYTES = 70
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
    boundary = _boundary(header_of(request.scope, b"content-type"))
    file_id = new_id("file-")
    writer = await asyncio.to_thread(storage.files.contents.writer, file_id)
    with writer:
        form = _UploadForm(boundary, writer, storage.max_file_bytes)
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client went away while sending its file")
            form.feed(message.get("body", b""))
            if form.is_full:
                await asyncio.to_thread(form.flush)
            if not message.get("more_body", False):
                break
        if not form.has_ended:
            raise InvalidRequest("The form's body ends before its last boundary: send all of it")
        lifetime_s = form.check()
        await asyncio.to_thread(form.flush)
        await asyncio.to_thread(writer.commit)
    now = storage.clock()
    file = StoredFile(
        id=file_id, tenant=tenant_of(request).name, filename=form.filename, purpose=UPLOADED,
        bytes=form.num_bytes, created_s=now, expires_s=now + lifetime_s,
    )  # fmt: skip
    await asyncio.to_thread(storage.files.add, file)
    return json_response(file_body(file))


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
        raise InvalidRequest(
            f"The body comes with 'Content-Type: {content_type[:80]}': send a file as multipart/form-data, "
            "as `curl -F purpose=batch -F file=@requests.jsonl` does"
        )
    return boundary


class _UploadForm:
    """The fields of an upload, and its file on the way to the store."""

    def __init__(self, boundary: bytes, writer: ContentWriter, max_bytes: int) -> None:
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._add_content,
                "on_end": self._end,
            },
        )
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._writer = writer
        self._max_bytes = max_bytes
        self._fields: dict[str, bytearray] = {}  # the file's content is in `_pending`
        self._part = ""
        self._pending = bytearray()
        self.filename = "upload"
        self.num_bytes = 0
        self.has_ended = False

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= _WRITE_BYTES

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"The form cannot be read: {error}") from error

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        name = self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise InvalidRequest("A part of the form has no name: give it 'Content-Disposition: form-data; name=...'")
        if name not in ("file", *_FIELDS):
            raise InvalidRequest(
                f"Unknown parameter: '{name[:60]}': a file has {', '.join(('file', *_FIELDS))}", param=name[:60]
            )
        if name in self._fields:
            raise InvalidRequest(f"The form has '{name}' twice: send it once", param=name)
        self._fields[name] = bytearray()
        if name == "file":
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255] or "upload"

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._part != "file":
            self._fields[self._part] += data[start:end]
            if len(self._fields[self._part]) > MAX_FIELD_BYTES:
                raise InvalidRequest(
                    f"'{self._part}' has more than {MAX_FIELD_BYTES} bytes: only 'file' may", param=self._part
                )
            return
        self.num_bytes += end - start
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLarge(f"The file is too large: at most {self._max_bytes} bytes are stored", param="file")
        self._pending += data[start:end]

    def _end(self) -> None:
        self.has_ended = True

    def flush(self) -> None:
        self._writer.write(bytes(self._pending))
        self._pending.clear()

    def check(self) -> float:
        """Seconds until it expires. Raises InvalidRequest."""
        given = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if "file" not in given:
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
