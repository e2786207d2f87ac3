"""Files and batches as values, and their states.

validating ─▶ in_progress ─▶ finalizing ─▶ completed
    │              │              └──────▶ expired      the window ended first: what was done is kept
    ├─▶ failed     └─▶ cancelling ──────▶ cancelled     the same
    └─▶ cancelling
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["openai", "anthropic"]
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that a gateway process owns."""
ENDED = ("failed", "completed", "expired", "cancelled")
UPLOADED, RESULTS = "batch", "batch_output"
"""Purposes of files: a client's, and Baton's own."""
WINDOW = re.compile(r"([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h")
WINDOWS = "24h, or other hours from 1h to 168h"
"""The completion windows that a batch may have."""


def new_id(prefix: str) -> str:
    return f"{prefix}{os.urandom(12).hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """`*_s`: seconds since 1970. A hidden file is not listed: it is the input of another API's batch."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_s: float
    expires_s: float | None = None
    is_hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """An error in a line of an input file (the first is 1), or in the file (None)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """`line` counts from 0. `content` is the line of the output or error file, with its end."""

    line: int
    content: bytes
    is_error: bool = False
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """`times`: when each state began. `ends_as`: the state after finalizing or cancelling. A former owner has a
    lesser `generation`, and cannot write."""

    id: str
    tenant: str
    key_id: str
    api: Api
    endpoint: str
    model: str
    input_file_id: str
    window_text: str
    created_s: float
    expires_s: float
    metadata: Mapping[str, str] | None = None
    output_expires_s: float | None = None
    status: str = "validating"
    ends_as: str = ""
    times: Mapping[str, float] = field(default_factory=dict)
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAsked:
    """A page of a list, after or before an id. `names`: the API's names of the cursors."""

    limit: int
    after: str | None = None
    before: str | None = None
    names: tuple[str, str] = ("after", "before")
    ascending: bool = False
    filters: Mapping[str, Any] = field(default_factory=dict)
