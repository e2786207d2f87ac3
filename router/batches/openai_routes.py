"""The endpoints of OpenAI's Files and Batches."""

from __future__ import annotations

from collections.abc import Sequence

from router.batches.asked import MAX_LIMIT
from router.batches.batch_routes import BatchBody, cancel_batch, create_batch, list_batches, retrieve_batch
from router.batches.file_routes import (
    MAX_LISTED,
    UploadForm,
    delete_file,
    file_content,
    list_files,
    retrieve_file,
    upload_file,
)
from router.faces.endpoint import Endpoint, Face, Schema, query_parameter

_ID = {"type": "string", "minLength": 1}


def _paged(most: int, default: int) -> Sequence[Schema]:
    return (
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most, "default": default}),
        query_parameter("after", _ID),
        query_parameter("order", {"enum": ["asc", "desc"]}),
    )


_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
BATCHES_FACE = Face(
    endpoints=(
        Endpoint(
            "POST", "/v1/files", upload_file, "Stores a file of requests for a batch", form=UploadForm, is_upload=True
        ),
        Endpoint(
            "GET", "/v1/files", list_files, "The files of the key's tenant, newest first",
            query=(*_paged(MAX_LISTED, MAX_LISTED), query_parameter("purpose", {"type": "string"})),
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
            query=_paged(MAX_LIMIT, 20),
        ),
        Endpoint("GET", _BATCH, retrieve_batch, "One batch"),
        Endpoint("POST", f"{_BATCH}/cancel", cancel_batch, "Ends a batch: what is done is kept"),
    )
)  # fmt: skip
