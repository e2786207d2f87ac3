"""Anthropic's Message Batches: /v1/messages/batches, on the store and the workers of OpenAI's.

requests ─▶ a hidden file of lines, as OpenAI's batches have them ─▶ checked ─▶ batch ─▶ ... ─▶ a hidden file of results

The body, `{"requests": [{...}, {...}]}`, is split into requests as it arrives: of 200 MB at most one is in memory.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Annotated, Any

import orjson
from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import Cancelled, InvalidRequest, NotFound, PayloadTooLarge
from router.batches.batch_routes import model_of
from router.batches.file_routes import KEPT_S, batch_of, batch_page, cancelled_batch, content_response, storage_of
from router.batches.line_run import MESSAGES
from router.batches.lines import InputChecker
from router.faces.anthropic.messages import ANTHROPIC
from router.faces.endpoint import Endpoint, Face
from router.files.batch_storage import BatchStorage
from router.files.contents import spooled
from router.files.records import ENDED, UPLOADED, PageAsked, StoredBatch, StoredFile, new_id
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Body, Query, read_json
from router.http.middleware import tenant_of

_BEGIN = re.compile(rb'\s*\{\s*"requests"\s*:\s*\[')
_END = re.compile(rb"\s*\]\s*\}\s*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_SHAPE = 'The body must be an object with one list, {"requests": [...]}'
MAX_BEGIN_BYTES = 1024


class RequestsReader:
    """Splits a body into requests: feed it the body, then call `end`. It does not check whether a request is JSON.
    Raises InvalidRequest."""

    def __init__(self, max_request_bytes: int) -> None:
        self._max_bytes = max_request_bytes
        self._buffer = bytearray()
        self._at = 0  # the buffer is searched up to here
        self._depth = 0
        self._in_string = False
        self._has_begun = False
        self._has_comma = False  # behind the last request
        self.num_requests = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The requests that are complete."""
        self._buffer += data
        if not self._has_begun:
            if (begin := _BEGIN.match(self._buffer)) is None:
                if len(self._buffer) > MAX_BEGIN_BYTES:
                    raise InvalidRequest(_SHAPE, param="requests")
                return
            del self._buffer[: begin.end()]
            self._has_begun = True
        while (request := self._next()) is not None:
            self.num_requests += 1
            yield request
        if len(self._buffer) > self._max_bytes:
            raise InvalidRequest(
                f"requests.{self.num_requests} has more than {self._max_bytes} bytes", param="requests"
            )

    def end(self) -> None:
        """All of the body has been fed."""
        if not self._has_begun or self._depth or not _END.fullmatch(self._buffer):
            raise InvalidRequest(_SHAPE, param="requests")
        if not self.num_requests:
            raise InvalidRequest("'requests' is empty: give a request", param="requests")

    def _begins(self) -> bool:
        """Whether the buffer begins with the next request, after separators."""
        del self._buffer[: len(self._buffer) - len(self._buffer.lstrip())]
        if self.num_requests and not self._has_comma and self._buffer.startswith(b","):
            self._has_comma = True
            del self._buffer[: len(self._buffer) - len(self._buffer[1:].lstrip())]
        if self._buffer.startswith(b"{") and (self._has_comma or not self.num_requests):
            return True
        if self._buffer and (self._has_comma or not self._buffer.startswith(b"]")):
            behind = " behind a comma" if self.num_requests else ""
            raise InvalidRequest(f"requests.{self.num_requests} is no object{behind}", param="requests")
        return False

    def _next(self) -> bytes | None:
        """The next request; None after the last one, or until more of the body has come."""
        if not self._depth:
            if not self._begins():
                return None
            self._at, self._has_comma = 0, False
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._at)) is not None:
            sign, self._at = found[0], found.end()
            if sign == b"\\":
                if self._at == len(self._buffer):
                    self._at -= 1  # the escaped character has not arrived
                    return None
                self._at += 1
            elif sign == b'"':
                self._in_string = not self._in_string
            elif sign in b"{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    request = bytes(self._buffer[: self._at])
                    del self._buffer[: self._at]
                    return request
        self._at = len(self._buffer)
        return None


PATH = "/v1/messages/batches"
WINDOW_S = 86_400.0
MAX_LISTED = 1000
_ID_PATTERN = "[a-zA-Z0-9_-]{1,64}"
_CUSTOM_ID = re.compile(_ID_PATTERN)
_STATES = {"cancelling": "canceling"} | dict.fromkeys(ENDED, "ended")
_UNDONE = re.compile(rb'"result":\{"type":"(?:canceled|expired)"\}\}$')
_READ_BYTES = 1 << 20


_PARAMS = {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}


class MessageRequest(Body):
    """`params` is the body of a request to /v1/messages: of it the model alone is checked before the batch runs."""

    custom_id: str = Field(pattern=f"^{_ID_PATTERN}$", description="a string of letters, digits, '_' and '-'")
    params: Annotated[dict[str, Any], WithJsonSchema(_PARAMS)] = Field(
        description="an object, the body of a request to /v1/messages"
    )


class MessageBatchBody(Body):
    """For the API's description: the body is read as it arrives."""

    requests: list[MessageRequest] = Field(min_length=1, description="a list of requests")


async def create_message_batch(gateway: Gateway, request: Request) -> Response:
    storage, tenant = storage_of(gateway), tenant_of(request).name
    with spooled() as lines:
        await _receive(request, lines, storage, gateway.http.max_body_bytes)
        model, num_requests = await asyncio.to_thread(_check, gateway, storage, lines)
        num_bytes = lines.seek(0, os.SEEK_END)
        file_id = new_id("file-")
        await asyncio.to_thread(storage.files.contents.store, file_id, lines)
    now = storage.clock()
    file = StoredFile(
        id=file_id, tenant=tenant, filename=f"{file_id}.jsonl", purpose=UPLOADED, bytes=num_bytes, created_s=now,
        expires_s=now + KEPT_S, is_hidden=True,
    )  # fmt: skip
    await asyncio.to_thread(storage.files.add, file)
    batch = StoredBatch(
        id=new_id("msgbatch_"), tenant=tenant, key_id=gateway.access.key_id, api="anthropic", endpoint=MESSAGES,
        model=model, input_file_id=file_id, window_text="24h", created_s=now, expires_s=now + WINDOW_S,
        total=num_requests,
    )  # fmt: skip
    await asyncio.to_thread(storage.batches.add, batch)
    storage.changed.set()
    return await _shown(storage, request, batch)


async def _receive(request: Request, to: IO[bytes], storage: BatchStorage, max_request_bytes: int) -> None:
    """Writes the requests as lines. Raises InvalidRequest, PayloadTooLarge."""
    reader, num_bytes = RequestsReader(max_request_bytes), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away while sending its batch")
        data = message.get("body", b"")
        num_bytes += len(data)
        if num_bytes > storage.max_file_bytes:
            raise PayloadTooLarge(f"A batch has at most {storage.max_file_bytes} bytes", param="requests")
        lines = b"".join(_line(raw, reader.num_requests) for raw in reader.feed(data))
        if reader.num_requests > storage.max_lines:
            raise InvalidRequest(f"A batch has at most {storage.max_lines} requests: split it", param="requests")
        if lines:
            await asyncio.to_thread(to.write, lines)
        if not message.get("more_body", False):
            break
    reader.end()


def _line(raw: bytes, number: int) -> bytes:
    """Raises InvalidRequest."""
    where = f"requests.{number - 1}"
    try:
        found = read_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}", param=where) from None
    custom_id, params = found.get("custom_id"), found.get("params")
    if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
        raise InvalidRequest(
            f"{where}.custom_id must be a string of 1 to 64 letters, digits, '_' and '-'", param=f"{where}.custom_id"
        )
    if not isinstance(params, dict):
        raise InvalidRequest(f"{where}.params must be an object, the request's body", param=f"{where}.params")
    if unknown := sorted(found.keys() - MessageRequest.model_fields.keys()):
        raise InvalidRequest(
            f"{where} has {unknown[0][:60]!r}: it may have custom_id and params", param=f"{where}.{unknown[0][:60]}"
        )
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params}) + b"\n"


def _check(gateway: Gateway, storage: BatchStorage, lines: IO[bytes]) -> tuple[str, int]:
    """Returns the model and the number of requests. Raises InvalidRequest for the first request that is wrong in
    itself; an error of its model becomes its result."""

    def read(start: int, size: int) -> bytes:
        lines.seek(start)
        return lines.read(size)

    model = model_of(gateway, read)
    gateway = gateway.owner(model)
    checker = InputChecker(
        MESSAGES, gateway.check_batch_model, max_lines=storage.max_lines, max_line_bytes=gateway.http.max_body_bytes
    )
    checker.read(read)
    for error in checker.errors:
        where = "requests" if error.line is None else f"requests.{error.line - 1}"
        part = (error.param or "").replace("body.", "params.", 1)
        raise InvalidRequest(f"{where}: {error.message}", param=f"{where}.{part}".rstrip("."))
    return model, len(checker.index)


class MessageBatchQuery(Query):
    limit: int = Field(default=20, ge=1, le=MAX_LISTED, description=f"an integer between 1 and {MAX_LISTED}")
    after_id: str | SkipJsonSchema[None] = Field(default=None, min_length=1, description="the id of an entry")
    before_id: str | SkipJsonSchema[None] = Field(default=None, min_length=1, description="the id of an entry")


async def list_message_batches(gateway: Gateway, request: Request, asked: MessageBatchQuery) -> Response:
    storage, names = storage_of(gateway), ("after_id", "before_id")
    page = PageAsked(
        limit=asked.limit, after=asked.after_id, before=asked.before_id, names=names, filters={"api": "anthropic"}
    )
    batches, has_more = await batch_page(gateway, request, page)
    shown = [await _body(storage, request, batch) for batch in batches]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return json_response({"data": shown, "has_more": has_more} | ends)


async def retrieve_message_batch(gateway: Gateway, request: Request) -> Response:
    return await _shown(storage_of(gateway), request, await batch_of(gateway, request, "anthropic"))


async def cancel_message_batch(gateway: Gateway, request: Request) -> Response:
    return await _shown(storage_of(gateway), request, await cancelled_batch(gateway, request, "anthropic"))


async def delete_message_batch(gateway: Gateway, request: Request) -> Response:
    """Its requests and results, too."""
    storage, tenant = storage_of(gateway), tenant_of(request).name
    batch = await batch_of(gateway, request, "anthropic")
    await asyncio.to_thread(storage.batches.delete, tenant, batch.id, "anthropic")
    for file_id in (batch.input_file_id, batch.output_file_id):
        if file_id is not None:
            with suppress(NotFound):  # it has expired
                await asyncio.to_thread(storage.files.delete, tenant, file_id)
    return json_response({"id": batch.id, "type": "message_batch_deleted"})


async def message_batch_results(gateway: Gateway, request: Request) -> Response:
    storage = storage_of(gateway)
    batch = await batch_of(gateway, request, "anthropic")
    if batch.status not in ENDED:
        raise InvalidRequest(f"The batch {batch.id} has no results yet: its processing_status is not 'ended'")
    if batch.output_file_id is None:
        why = f": {batch.errors[0].message}" if batch.errors else ""
        raise InvalidRequest(f"The batch {batch.id} has ended without results{why}")
    file = await asyncio.to_thread(storage.files.find, batch.tenant, batch.output_file_id)
    return await content_response(storage, file)


async def _shown(storage: BatchStorage, request: Request, batch: StoredBatch) -> Response:
    return json_response(await _body(storage, request, batch))


async def _body(storage: BatchStorage, request: Request, batch: StoredBatch) -> dict[str, Any]:
    ended, undone = batch.status in ENDED, 0
    if batch.status in ("cancelled", "expired") and batch.output_file_id is not None:
        undone = await asyncio.to_thread(_num_undone, storage, batch.output_file_id)
    ended_s = max((batch.times[state] for state in ENDED if state in batch.times), default=None)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": _STATES.get(batch.status, "in_progress"),
        "request_counts": {
            "processing": 0 if ended else max(0, batch.total - batch.completed - batch.failed),
            "succeeded": batch.completed,
            "errored": batch.failed - undone,
            "canceled": undone if batch.status == "cancelled" else 0,
            "expired": undone if batch.status == "expired" else 0,
        },
        "created_at": _time(batch.created_s),
        "expires_at": _time(batch.expires_s),
        "ended_at": _time(ended_s),
        "cancel_initiated_at": _time(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"{request.base_url}{PATH[1:]}/{batch.id}/results" if batch.output_file_id else None,
    }


def _num_undone(storage: BatchStorage, file_id: str) -> int:
    """Counts requests without a result; 0 for a file that has expired."""
    count, rest, start = 0, b"", 0
    while True:
        try:
            data = storage.files.contents.read(file_id, start, _READ_BYTES)
        except NotFound:
            return 0
        if not data:
            return count
        start += len(data)
        *lines, rest = (rest + data).split(b"\n")
        count += sum(_UNDONE.search(line[-60:]) is not None for line in lines)


def _time(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


_BATCH = f"{PATH}/{{batch_id}}"
MESSAGE_BATCHES_FACE = Face(
    api=ANTHROPIC,
    endpoints=(
        Endpoint(
            "POST", PATH, create_message_batch, "Runs requests of the Messages API when the workers have room",
            body=MessageBatchBody, is_upload=True,
        ),
        Endpoint(
            "GET", PATH, list_message_batches, "The batches of the key's tenant, newest first",
            query=MessageBatchQuery,
        ),
        Endpoint("GET", _BATCH, retrieve_message_batch, "One batch"),
        Endpoint("DELETE", _BATCH, delete_message_batch, "Deletes a batch that has ended, with its results"),
        Endpoint("POST", f"{_BATCH}/cancel", cancel_message_batch, "Ends a batch: what is done is kept"),
        Endpoint("GET", f"{_BATCH}/results", message_batch_results, "The results of a batch that has ended, as lines"),
    ),
)  # fmt: skip
