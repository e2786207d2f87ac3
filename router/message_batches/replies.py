"""The replies of the routes of Message Batches, as the API's description shows them."""

from __future__ import annotations

from typing import Literal

from router.openai.responses import Reply


class MessageCounts(Reply):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchReply(Reply):
    """Times are of RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchesReply(Reply):
    data: list[MessageBatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchDeleted(Reply):
    id: str
    type: Literal["message_batch_deleted"]
