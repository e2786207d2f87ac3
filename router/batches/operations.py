"""The routes of files and batches, as the API's description has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.batches.asked import MAX_LIMIT
from router.batches.batch_routes import BatchBody
from router.batches.file_routes import EXPIRY_S, MAX_LISTED
from router.batches.replies import BatchesReply, BatchReply, FileDeleted, FileReply, FilesReply
from router.operation import Operation, Schema, query_parameter

_ASKING = (400, 401, 404, 503)
_SENDING = (*_ASKING, 408)
_TEXT = {"type": "string"}
_ID = {"type": "string", "minLength": 1}
_UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines, a request each"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


def _paged(most: int, default: int) -> Sequence[Schema]:
    return (
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most, "default": default}),
        query_parameter("after", _ID),
        query_parameter("order", {"enum": ["asc", "desc"]}),
    )


BATCH_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/files"): Operation(
        summary="Stores a file of requests for a batch", form=_UPLOAD, reply=FileReply, errors=_SENDING
    ),
    ("get", "/v1/files"): Operation(
        summary="The files of the key's tenant, newest first", reply=FilesReply, errors=_ASKING,
        parameters=(*_paged(MAX_LISTED, MAX_LISTED), query_parameter("purpose", _TEXT)),
    ),
    ("get", "/v1/files/{file_id}"): Operation(summary="One file", reply=FileReply, errors=_ASKING),
    ("delete", "/v1/files/{file_id}"): Operation(summary="Deletes a file", reply=FileDeleted, errors=_ASKING),
    ("get", "/v1/files/{file_id}/content"): Operation(
        summary="What is in a file", texts={"application/octet-stream": "As it was uploaded, or as a batch wrote it"},
        errors=_ASKING,
    ),
    ("post", "/v1/batches"): Operation(
        summary="Runs the requests of a file when the workers have room", body=BatchBody, reply=BatchReply,
        errors=(*_SENDING, 415),
    ),
    ("get", "/v1/batches"): Operation(
        summary="The batches of the key's tenant, newest first", reply=BatchesReply, errors=_ASKING,
        parameters=_paged(MAX_LIMIT, 20),
    ),
    ("get", "/v1/batches/{batch_id}"): Operation(summary="One batch", reply=BatchReply, errors=_ASKING),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(
        summary="Ends a batch: what is done is kept", reply=BatchReply, errors=_ASKING
    ),
}  # fmt: skip
