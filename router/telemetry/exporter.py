"""Sends the traces of ended requests to a collector, from a thread of its own.

    request ends ─▶ queue, bounded ─▶ thread: of 5 s, or 512, in one POST ─▶ collector
                                        ▲                                      │
                                        └── the same again after a pause ◀─────┘ away, or busy

A request costs the event loop a few attributes and a place in the queue. While the collector is away nothing is
encoded, a connection is tried after pauses that grow to half a minute, and what finds the queue full is dropped and
counted.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import httpx
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import code_of
from protos.event_loop import loop_time
from router.config import TelemetryConfig
from router.telemetry.context import Arrival, TraceParent, arrival, parse_traceparent
from router.telemetry.otlp import export_request
from router.telemetry.spans import Attribute, EndedChoice, EndedRequest
from router.text.sampling_request import TextRequest
from router.text.text_stream import Usage
from router.traces.request_trace import RequestTrace

log = logging.getLogger("baton.telemetry")

MAX_QUEUED = 2048
MAX_BATCH = 512
FLUSH_S = 5.0
"""As OpenTelemetry's SDKs have it, with the two above: each POST costs half a millisecond."""
TIMEOUT_S = 5.0
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
QUIET_S = 60.0  # between two warnings of a collector that is away
_RETRIED = (429, 502, 503, 504)
MAX_UNANSWERED = 3
"""A batch that was sent so often without an answer may have been taken each time."""


class TraceExporter(Collector):
    """`close` it at the end. Series: `baton_traces_total{outcome}`: `sent`, `dropped` for want of room, `failed`:
    refused by the collector, or not taken before the end."""

    def __init__(
        self, config: TelemetryConfig, *, model: str, gateway_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = config.traces_url
        self._headers = {"content-type": "application/json", **config.header_values}
        self._sample = config.sample
        self._model = model
        self._resource: Mapping[str, Attribute] = {
            "service.name": config.service_name,
            "service.instance.id": gateway_id,
        }
        self._clock = clock
        self._warned_s = -math.inf
        self.outcomes: Counter[str] = Counter(sent=0, dropped=0, failed=0)
        self._queue: queue.Queue[EndedRequest] = queue.Queue(MAX_QUEUED)
        self._wall_offset_s = 0.0
        self._num_unanswered = 0  # of the present batch
        self._due = threading.Event()  # a batch is complete
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def arrived(self, traceparent: str) -> None:
        """A request's head is there; called by the task that answers it."""
        arrival.set(Arrival(at_s=loop_time(), parent=parse_traceparent(traceparent)))

    def ended(
        self,
        ask: TextRequest,
        records: Sequence[RequestTrace],
        usage: Usage,
        endpoint: str,
        error: BaseException | None,
    ) -> None:
        """Exports a request that is sampled: by its caller if that has decided, else by `sample`."""
        came = arrival.get()
        parent = came.parent if came is not None else None
        if not records or not self._is_sampled(parent):
            return
        if self._queue.full():  # it cannot fill up before the put: only the event loop puts
            self.outcomes["dropped"] += 1
            return
        now, received_s = loop_time(), records[0].received_s
        self._wall_offset_s = time.time() - now
        firsts = [one.timestamps.first_s for one in records if one.timestamps.first_s is not None]
        record = EndedRequest(
            trace_id=parent.trace_id if parent is not None else os.urandom(16).hex(),
            arrival=came or Arrival(at_s=received_s, parent=None),
            received_s=received_s,
            first_s=min(firsts, default=None),
            ended_s=now,
            endpoint=endpoint,
            model=self._model,
            response_id=ask.request_id,
            tenant=ask.tenant.name,
            attributes=_parameters(ask),
            choices=tuple(EndedChoice(events=tuple(one.events), finish=one.outcome) for one in records),
            num_prompt=usage.prompt_tokens,
            num_cached=usage.cached_tokens,
            num_output=usage.completion_tokens,
            code="" if error is None else code_of(error),
        )
        self._queue.put_nowait(record)
        if self._queue.qsize() >= MAX_BATCH:
            self._due.set()

    def close(self) -> None:
        """Sends what is queued, for `TIMEOUT_S` at most."""
        self._closing.set()
        self._due.set()
        self._thread.join(TIMEOUT_S)

    def collect(self) -> Iterable[Metric]:
        traces = CounterMetricFamily("baton_traces", "Traces of requests for the collector", labels=("outcome",))
        for outcome, count in self.outcomes.items():
            traces.add_metric((outcome,), count)
        yield traces

    def _is_sampled(self, parent: TraceParent | None) -> bool:
        return parent.is_sampled if parent is not None else random.random() < self._sample

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, headers=self._headers) as client:
            closing = False
            while not closing:
                self._due.wait(FLUSH_S)
                self._due.clear()
                closing = self._closing.is_set()
                while batch := self._batch():
                    self._send(client, batch)

    def _batch(self) -> list[EndedRequest]:
        batch: list[EndedRequest] = []
        with suppress(queue.Empty):
            while len(batch) < MAX_BATCH:
                batch.append(self._queue.get_nowait())
        return batch

    def _send(self, client: httpx.Client, batch: Sequence[EndedRequest]) -> None:
        """Returns when the collector has taken the batch, or will not. Must not raise: the thread would end, and no
        later trace be sent."""
        try:
            body = export_request(batch, resource=self._resource, wall_offset_s=self._wall_offset_s)
            pause_s, self._num_unanswered = PAUSE_S, 0
            while not self._is_taken(client, body):
                if self._closing.wait(pause_s):
                    self.outcomes["failed"] += len(batch)
                    return
                pause_s = min(MAX_PAUSE_S, 2.0 * pause_s)
        except httpx.HTTPError as error:
            self.outcomes["failed"] += len(batch)
            self._warn("%d traces were refused by %s: %s", len(batch), self._url, error)
        except Exception:
            self.outcomes["failed"] += len(batch)
            log.exception("%d traces were not sent: internal error", len(batch))
        else:
            self.outcomes["sent"] += len(batch)

    def _is_taken(self, client: httpx.Client, body: bytes) -> bool:
        """False if the same may be taken later. Raises httpx.HTTPError if it never will."""
        try:
            answer = client.post(self._url, content=body)
        except httpx.TransportError as error:
            self._warn("the collector at %s takes no traces, which wait: %s", self._url, error)
            self._num_unanswered += not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if self._num_unanswered == MAX_UNANSWERED:
                raise
            return False
        if answer.status_code in _RETRIED:
            self._warn("the collector at %s takes no traces, which wait: HTTP %d", self._url, answer.status_code)
            self._closing.wait(min(MAX_PAUSE_S, _seconds(answer.headers.get("retry-after", ""))))
            return False
        answer.raise_for_status()
        return True

    def _warn(self, text: str, *about: object) -> None:
        if self._clock() - self._warned_s >= QUIET_S:
            self._warned_s = self._clock()
            log.warning(f"{text}; %d were dropped for want of room so far", *about, self.outcomes["dropped"])


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0.0


def _parameters(ask: TextRequest) -> Mapping[str, Attribute]:
    sampling = ask.jobs[0].sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.choice.count": ask.n,
        "baton.request_id": ask.jobs[0].group_id,
    }
