"""The seam for code that watches requests: register a `RequestObserver` in `cluster.gateway.model_backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from protos.errors import code_of
from router.text.sampling_request import TextRequest
from router.text.text_stream import NO_USAGE, Usage, UsageCounter
from router.traces.request_trace import RequestTrace

BATCH = "batch:"
"""The prefix of the endpoint of a batch's requests."""


class ObservedRequest(NamedTuple):
    ask: TextRequest
    records: Sequence[RequestTrace]  # one a job
    counted: UsageCounter
    endpoint: str
    key_id: str
    model: str  # the served name, or the adapter's

    @property
    def is_batch(self) -> bool:
        return self.endpoint.startswith(BATCH)


class EndedRequest(NamedTuple):
    request: ObservedRequest
    usage: Usage
    error: BaseException | None

    @classmethod
    def of(cls, request: ObservedRequest, error: BaseException | None) -> EndedRequest:
        """The end of a request. One that failed before a worker had it has no usage."""
        had = error is None or request.counted.num_tokens or any(record.choices for record in request.records)
        return cls(request, request.counted.usage() if had else NO_USAGE, error)

    @property
    def outcome(self) -> str:
        """ "ok", or the error's code."""
        return "ok" if self.error is None else code_of(self.error)


class RequestObserver(Protocol):
    """The gateway calls both methods on its event loop, for every request that a tenant's limits admit. `ended` comes
    once, after the request's records have ended, however the request ended. Neither may wait or raise."""

    def began(self, request: ObservedRequest) -> None: ...

    def ended(self, ended: EndedRequest) -> None: ...
