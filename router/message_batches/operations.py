"""The routes of Message Batches, as the API's description has them."""

from __future__ import annotations

from collections.abc import Mapping

from router.anthropic.replies import MessagesErrorReply
from router.message_batches.replies import MessageBatchDeleted, MessageBatchesReply, MessageBatchReply
from router.message_batches.routes import MAX_LISTED, PATH, MessageBatchBody
from router.operation import Operation, query_parameter

_ASKING = (400, 401, 404, 529)
_ID = {"type": "string", "minLength": 1}
_BATCH = f"{PATH}/{{batch_id}}"
MESSAGE_BATCH_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", PATH): Operation(
        summary="Runs requests of the Messages API when the workers have room", body=MessageBatchBody,
        reply=MessageBatchReply, errors=(*_ASKING, 408), error=MessagesErrorReply,
    ),
    ("get", PATH): Operation(
        summary="The batches of the key's tenant, newest first", reply=MessageBatchesReply, errors=_ASKING,
        error=MessagesErrorReply,
        parameters=(
            query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20}),
            query_parameter("after_id", _ID), query_parameter("before_id", _ID),
        ),
    ),
    ("get", _BATCH): Operation(
        summary="One batch", reply=MessageBatchReply, errors=_ASKING, error=MessagesErrorReply
    ),
    ("delete", _BATCH): Operation(
        summary="Deletes a batch that has ended, with its results", reply=MessageBatchDeleted,
        errors=_ASKING, error=MessagesErrorReply,
    ),
    ("post", f"{_BATCH}/cancel"): Operation(
        summary="Ends a batch: what is done is kept", reply=MessageBatchReply, errors=_ASKING,
        error=MessagesErrorReply,
    ),
    ("get", f"{_BATCH}/results"): Operation(
        summary="The results of a batch that has ended",
        texts={"application/x-jsonl": "A line of JSON for each request"},
        errors=_ASKING, error=MessagesErrorReply,
    ),
}  # fmt: skip
