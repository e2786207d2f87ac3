"""Series of batches: lines, their tokens, and batches by how they ended."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from router.batches.line_run import LineAnswer


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.batches = Counter("baton_batches", "Batches that have ended", ("status",), registry=registry)
        self._lines = Counter("baton_batch_requests", "Requests of batches answered", ("outcome",), registry=registry)
        self.failed_looks = Counter("baton_batch_failed_looks", "Failed looks for batches to run", registry=registry)
        self._tokens = Counter("baton_batch_tokens", "Tokens of requests of batches", ("kind",), registry=registry)

    def ended(self, answer: LineAnswer) -> None:
        self._lines.labels("ok" if answer.status < 300 else "error").inc()
        usage = answer.usage
        counts = {
            "input": usage.prompt_tokens - usage.cached_tokens,
            "cached": usage.cached_tokens,
            "output": usage.completion_tokens,
        }
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
