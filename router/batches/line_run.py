"""One line of a batch, through the route that its endpoint has for clients: what is refused there is refused here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from protos.errors import BatonError, BudgetExhausted, InvalidRequest, Overloaded
from router.auth.tenants import Tenant
from router.faces.anthropic.messages import ANTHROPIC, ANTHROPIC_FACE
from router.faces.endpoint import Serve
from router.faces.openai.openai_api import OPENAI_FACE
from router.faces.responses.responses import RESPONSES_FACE
from router.files.records import LineResult, StoredBatch
from router.gateway import Gateway
from router.http.api import OPENAI, Api, error_response, internal_error
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.request_observer import BATCH, EndedRequest, ObservedRequest
from router.request_metrics import Track
from router.text.text_stream import NO_USAGE, Usage
from router.traces.request_trace import RequestTraces

log = logging.getLogger("baton.batches")

SERVED: Mapping[str, Serve] = {
    endpoint.path: endpoint.answer
    for face in (OPENAI_FACE, RESPONSES_FACE)
    for endpoint in face.endpoints
    if endpoint.track
}
"""Endpoints of OpenAI's batches."""
MESSAGES = "/v1/messages"
_ROUTES = {endpoint.path: endpoint.answer for endpoint in ANTHROPIC_FACE.endpoints} | dict(SERVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """A whole answer of a route."""

    status: int
    body: bytes
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """A line. `name`: its request's, the same at each attempt."""

    number: int
    custom_id: str
    name: str
    body: bytes


def read_line(batch: StoredBatch, number: int, raw: bytes) -> InputLine:
    found = orjson.loads(raw)
    try:
        body = orjson.dumps(found["body"])
    except TypeError:  # nested too deeply: so is the line itself, which the route refuses
        body = raw
    return InputLine(number=number, custom_id=found["custom_id"], name=f"{batch.id}-{number + 1}", body=body)


def may_pass(error: BatonError) -> bool:
    """Whether a line that failed with this error is tried again, because it may succeed soon."""
    return error.retryable or (isinstance(error, Overloaded) and not isinstance(error, BudgetExhausted))


class LineLedger:
    """Observes one attempt of a line, and writes no row if the line runs again. `records` has all attempts. `is_last`:
    no further attempt follows. `is_stopped`: the batch was cancelled or has expired, so an interrupted line does not
    run again."""

    def __init__(
        self, ledger: RequestLedger, records: RequestTraces, *, is_last: bool, is_stopped: Callable[[], bool]
    ) -> None:
        self._ledger = ledger
        self._records = records
        self._is_last = is_last
        self._is_stopped = is_stopped

    def began(self, request: ObservedRequest) -> None: ...

    def ended(self, ended: EndedRequest) -> None:
        if ended.error is not None and self._runs_again(ended.error):
            return
        records = ended.request.records
        runs = self._records.find(ended.request.ask.jobs[0].group_id)
        own = [*records[:1], *(trace for trace in runs if trace.choices)]
        self._ledger.ended(ended._replace(request=ended.request._replace(records=own)))

    def _runs_again(self, error: BaseException) -> bool:
        """Whether the line was interrupted by the end of its process."""
        if not isinstance(error, Exception):
            return not self._is_stopped()
        return not self._is_last and isinstance(error, BatonError) and may_pass(error)


async def answer_line(
    gateway: Gateway,
    batch: StoredBatch,
    tenant: Tenant,
    line: InputLine,
    *,
    is_last: bool,
    is_stopped: Callable[[], bool],
) -> LineAnswer:
    """Answers a line. Raises BatonError if the line may be tried again: without a worker or room. The last attempt
    answers with that error, and so does a tenant whose budget is spent: the line would wait until the next period."""
    api = ANTHROPIC if batch.endpoint == MESSAGES else OPENAI
    track = gateway.metrics.track(f"{BATCH}{batch.endpoint}")
    observers = gateway.observers
    if gateway.ledger is not None:
        ledger = LineLedger(gateway.ledger, gateway.routing.records, is_last=is_last, is_stopped=is_stopped)
        observers = (*observers, ledger)
    # The answer's own id is the line's: a line that runs again has the same row in the ledger.
    own = replace(gateway, names=_names(line), observers=observers)
    try:
        response: Any = await _ROUTES[batch.endpoint](own, _request(batch, tenant, line, api, track))
    except BatonError as error:
        track.finish(error)
        if not is_last and may_pass(error):
            raise
        response = error_response(error, api)
    except Exception as error:
        track.finish(error)
        log.exception("%s failed: internal error", line.name, extra={"request": line.name})
        response = error_response(internal_error(), api)
    else:
        track.finish()
    if not isinstance(response, Response):
        response = error_response(InvalidRequest("'stream' must be false: a batch has whole answers"), api)
    return LineAnswer(status=response.status_code, body=bytes(response.body), usage=track.usage or NO_USAGE)


def _names(line: InputLine) -> Iterator[str]:
    yield line.name
    yield from (f"{line.name}.{number}" for number in count(1))


def _request(batch: StoredBatch, tenant: Tenant, line: InputLine, api: Api, track: Track) -> Request:
    parts = [line.body]

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # no client goes away
        raise AssertionError

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": batch.endpoint, "raw_path": batch.endpoint.encode(),
        "query_string": b"", "headers": [], "client": None,
        "state": {"request_id": line.name, "tenant": tenant, "api": api, "track": track},
    }  # fmt: skip
    return Request(scope, receive)


# -- results -----------------------------------------------------------------------------------------------------------


def result_of(batch: StoredBatch, line: InputLine, answer: LineAnswer) -> LineResult:
    is_error, usage = answer.status >= 300, answer.usage
    custom_id = orjson.dumps(line.custom_id)
    if batch.api == "anthropic":
        kind = b"errored" if is_error else b"succeeded"
        key = b"error" if is_error else b"message"
        content = b'{"custom_id":%b,"result":{"type":"%b","%b":%b}}\n' % (custom_id, kind, key, answer.body)
    else:
        content = (
            b'{"id":"batch_req_%b","custom_id":%b,"response":{"status_code":%d,"request_id":"%b","body":%b},'
            b'"error":null}\n' % (_tail(line), custom_id, answer.status, line.name.encode(), answer.body)
        )
    return LineResult(
        line=line.number,
        content=content,
        is_error=is_error,
        input_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


UNDONE: Mapping[str, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}
"""Code and message of lines that did not run, by how their batch ends."""


def undone(batch: StoredBatch, line: InputLine, ends_as: str) -> LineResult:
    code, message = UNDONE[ends_as]
    custom_id = orjson.dumps(line.custom_id)
    if batch.api == "anthropic":
        kind = b"canceled" if ends_as == "cancelled" else b"expired"
        content = b'{"custom_id":%b,"result":{"type":"%b"}}\n' % (custom_id, kind)
    else:
        content = b'{"id":"batch_req_%b","custom_id":%b,"response":null,"error":%b}\n' % (
            _tail(line), custom_id, orjson.dumps({"code": code, "message": message}),
        )  # fmt: skip
    return LineResult(line=line.number, content=content, is_error=True)


def _tail(line: InputLine) -> bytes:
    return line.name.removeprefix("batch_").encode()
