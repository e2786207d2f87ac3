"""The replies of the routes of files and batches, as the API's description shows them."""

from __future__ import annotations

from typing import Literal

from router.openai.responses import Reply


class FileReply(Reply):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileDeleted(Reply):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FilesReply(Reply):
    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchProblem(Reply):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchProblems(Reply):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(Reply):
    total: int
    completed: int
    failed: int


class BatchCachedTokens(Reply):
    cached_tokens: int


class BatchReasoningTokens(Reply):
    reasoning_tokens: int


class BatchUsage(Reply):
    input_tokens: int
    input_tokens_details: BatchCachedTokens
    output_tokens: int
    output_tokens_details: BatchReasoningTokens
    total_tokens: int


class BatchReply(Reply):
    """Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchesReply(Reply):
    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool
