"""The tables of files and batches."""

from __future__ import annotations

from router.database.database import Transaction, check_schema

SCHEMA = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes BIGINT NOT NULL,
    created_s DOUBLE PRECISION NOT NULL, expires_s DOUBLE PRECISION, is_hidden INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key_id TEXT NOT NULL, api TEXT NOT NULL, endpoint TEXT NOT NULL,
    model TEXT NOT NULL, input_file_id TEXT NOT NULL, window_text TEXT NOT NULL, metadata TEXT NOT NULL,
    output_expires_s DOUBLE PRECISION, created_s DOUBLE PRECISION NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
    status TEXT NOT NULL, ends_as TEXT NOT NULL, times TEXT NOT NULL, errors TEXT NOT NULL,
    output_file_id TEXT, error_file_id TEXT,
    total BIGINT NOT NULL, completed BIGINT NOT NULL, failed BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL, reasoning_tokens BIGINT NOT NULL,
    generation BIGINT NOT NULL, lease_until_s DOUBLE PRECISION NOT NULL
);
CREATE TABLE IF NOT EXISTS batch_results (
    batch_id TEXT NOT NULL, line BIGINT NOT NULL, is_error INTEGER NOT NULL, content {blob} NOT NULL,
    PRIMARY KEY (batch_id, line)
);
CREATE TABLE IF NOT EXISTS uploads (
    upload_id TEXT PRIMARY KEY, file_id TEXT NOT NULL, bytes BIGINT, begun_s DOUBLE PRECISION NOT NULL
);
CREATE TABLE IF NOT EXISTS upload_parts (
    upload_id TEXT NOT NULL, number BIGINT NOT NULL, content {blob} NOT NULL, PRIMARY KEY (upload_id, number)
);
CREATE INDEX IF NOT EXISTS uploads_by_file ON uploads (file_id);
CREATE INDEX IF NOT EXISTS files_by_time ON files (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_time ON batches (tenant, created_s, id);
CREATE INDEX IF NOT EXISTS batches_by_state ON batches (status, lease_until_s);
"""


def prepare(transaction: Transaction) -> None:
    """Makes the tables that are missing. Raises Misconfigured for those of a later Baton."""
    check_schema(transaction, "batches", SCHEMA)
    blob = "BLOB" if transaction.dialect == "sqlite" else "BYTEA"
    for statement in _TABLES.format(blob=blob).split(";"):
        if statement.strip():
            transaction.run(statement)
