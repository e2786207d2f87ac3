"""The access log: one record a request, formatted by the log's handler."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from protos.codec import Value
from router.request_metrics import Track

log = logging.getLogger("baton.access")

MAX_PATH = 200
CLIENT_LEFT = 499
"""The client disconnected before the answer, as in nginx."""


class Access(Value, frozen=True, kw_only=True):
    """`outcome`: an error's code, "" if the status is enough. Tokens are None for a request that generates none."""

    method: str
    path: str
    status: int
    seconds: float
    client: str = ""
    request: str = ""
    tenant: str = ""
    outcome: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    def __str__(self) -> str:
        tokens = ""
        if self.prompt_tokens is not None:
            tokens = f", {self.prompt_tokens} + {self.output_tokens} tokens, {self.cached_tokens} cached"
        tenant = f", tenant {self.tenant}" if self.tenant else ""
        named = "".join(f", {one}" for one in (self.outcome, self.client, self.request) if one)
        return f"{self.method} {self.path} {self.status} in {self.seconds:.4f} s{tokens}{tenant}{named}"

    def fields(self) -> dict[str, Any]:
        """Fields of a JSON log line."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def is_logged() -> bool:
    return log.isEnabledFor(logging.INFO)


def log_access(
    method: str, path: str, status: int, seconds: float, *, client: str, request: str, tenant: str, track: Track | None
) -> None:
    """`track` is that of a request for tokens, once it has finished."""
    usage = track.usage if track is not None else None
    access = Access(
        method=method,
        path=path,
        status=status,
        seconds=round(seconds, 6),
        client=client,
        request=request,
        tenant=tenant,
        outcome=track.outcome if track is not None and track.outcome != "ok" else "",
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        cached_tokens=usage.cached_tokens if usage is not None else None,
        output_tokens=usage.completion_tokens if usage is not None else None,
    )
    log.handle(logging.LogRecord(log.name, logging.INFO, "", 0, access, None, None))
