"""OpenAI's Batches: /v1/batches. The endpoints of its Files and Batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, NotFound, UnknownModel
from router.batches.file_routes import (
    EXPIRY,
    EXPIRY_S,
    FileListQuery,
    ListQuery,
    UploadForm,
    batch_of,
    batch_page,
    cancelled_batch,
    delete_file,
    file_content,
    list_body,
    list_files,
    retrieve_file,
    storage_of,
    upload_file,
)
from router.batches.line_run import SERVED
from router.faces.endpoint import Endpoint, Face
from router.files.records import ENDED, UPLOADED, WINDOW, WINDOWS, StoredBatch, new_id
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Body, read_json
from router.http.middleware import tenant_of

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class OutputExpiry(Body):
    anchor: Literal["created_at"] = Field(description='"created_at"')
    seconds: int = Field(ge=EXPIRY_S[0], le=EXPIRY_S[1], description=EXPIRY)


class BatchBody(Body):
    """A window other than 24h is Baton's own."""

    input_file_id: str = Field(description="the id of a file whose purpose is batch")
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses"
    ] = Field(description=f"one of {', '.join(SERVED)}")
    completion_window: str = Field(pattern=f"^{WINDOW.pattern}$", description=WINDOWS)
    metadata: dict[str, str] | None = Field(default=None, description="an object of at most 16 strings")
    output_expires_after: OutputExpiry | None = Field(default=None, description="an object with anchor and seconds")

    def check_parts(self) -> None:
        if not WINDOW.fullmatch(self.completion_window):
            raise InvalidRequest(
                f"'completion_window' is {self.completion_window[:40]!r}: it must be {WINDOWS}",
                param="completion_window",
            )
        for name, value in (self.metadata or {}).items():
            if len(self.metadata or {}) > 16 or len(name) > 64 or len(value) > 512:
                raise InvalidRequest(
                    "'metadata' must have at most 16 names of at most 64 characters, with values of at most 512",
                    param="metadata",
                )

    @property
    def window_s(self) -> float:
        return 3600.0 * int(self.completion_window[:-1])


async def create_batch(gateway: Gateway, request: Request, body: BatchBody) -> Response:
    storage, tenant = storage_of(gateway), tenant_of(request).name
    try:
        file = await asyncio.to_thread(storage.files.find, tenant, body.input_file_id)
    except NotFound as error:
        raise NotFound(error.message, param="input_file_id") from None
    if file.purpose != UPLOADED:
        raise InvalidRequest(
            f"The file {file.id} has the purpose {file.purpose}: upload the input of a batch with purpose={UPLOADED}",
            param="input_file_id",
        )
    model = await asyncio.to_thread(model_of, gateway, partial(storage.files.contents.read, file.id))
    now, expiry = storage.clock(), body.output_expires_after
    batch = StoredBatch(
        id=new_id("batch_"), tenant=tenant, key_id=gateway.access.key_id, api="openai", endpoint=body.endpoint,
        model=model, input_file_id=file.id, window_text=body.completion_window, created_s=now,
        expires_s=now + body.window_s, metadata=body.metadata,
        output_expires_s=None if expiry is None else float(expiry.seconds),
    )  # fmt: skip
    await asyncio.to_thread(storage.batches.add, batch)
    storage.changed.set()
    return json_response(batch_body(batch))


def model_of(gateway: Gateway, read: Callable[[int, int], bytes]) -> str:
    """The model of the file's first line. Later checks name lines of another model."""
    if not gateway.models:
        return gateway.card.name
    first = read(0, gateway.http.max_body_bytes).lstrip().partition(b"\n")[0]
    try:
        named = str(read_json(first)["body"]["model"])
        card = gateway.serving(named).card
    except (ValueError, LookupError, TypeError, UnknownModel):
        card = gateway.card
    return card.parent or card.name


async def list_batches(gateway: Gateway, request: Request, asked: ListQuery) -> Response:
    batches, has_more = await batch_page(gateway, request, asked.page(api="openai"))
    return json_response(list_body([batch_body(batch) for batch in batches], has_more=has_more))


async def retrieve_batch(gateway: Gateway, request: Request) -> Response:
    return json_response(batch_body(await batch_of(gateway, request, "openai")))


async def cancel_batch(gateway: Gateway, request: Request) -> Response:
    return json_response(batch_body(await cancelled_batch(gateway, request, "openai")))


def batch_body(batch: StoredBatch) -> dict[str, Any]:
    errors = [asdict(one) for one in batch.errors]
    has_run = batch.status in ENDED and batch.status != "failed"
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window_text,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **{f"{state}_at": int(batch.times[state]) if state in batch.times else None for state in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": _usage(batch) if has_run else None,
        "metadata": batch.metadata,
    }


def _usage(batch: StoredBatch) -> dict[str, Any]:
    return {
        "input_tokens": batch.input_tokens,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": batch.output_tokens,
        "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
        "total_tokens": batch.input_tokens + batch.output_tokens,
    }


_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
BATCHES_FACE = Face(
    endpoints=(
        Endpoint(
            "POST", "/v1/files", upload_file, "Stores a file of requests for a batch", form=UploadForm, is_upload=True
        ),
        Endpoint(
            "GET", "/v1/files", list_files, "The files of the key's tenant, newest first",
            query=FileListQuery,
        ),
        Endpoint("GET", _FILE, retrieve_file, "One file"),
        Endpoint("DELETE", _FILE, delete_file, "Deletes a file"),
        Endpoint("GET", f"{_FILE}/content", file_content, "What is in a file"),
        Endpoint(
            "POST", "/v1/batches", create_batch, "Runs the requests of a file when the workers have room",
            body=BatchBody,
        ),
        Endpoint(
            "GET", "/v1/batches", list_batches, "The batches of the key's tenant, newest first",
            query=ListQuery,
        ),
        Endpoint("GET", _BATCH, retrieve_batch, "One batch"),
        Endpoint("POST", f"{_BATCH}/cancel", cancel_batch, "Ends a batch: what is done is kept"),
    )
)  # fmt: skip
