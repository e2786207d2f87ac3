"""Device seconds and KV byte-seconds of a request, estimated when it ends, from the speeds that its workers report.

    prefill   uncached prompt tokens / tokens that its worker reads in a second       * devices of the worker
    decode    answer tokens * time of a step / sequences that its worker runs at once * devices of the worker

The sum over all requests is at most the time that devices computed; the rest is idle. A step that computes prompts
beside answers counts for the answers. KV is taken to grow evenly.

    prefill   bytes of a token * (cached + prompt tokens) / 2         * seconds from its routing to its first token
    decode    bytes of a token * (prompt tokens + answer tokens / 2)  * seconds from its first token to its last
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.jobs import WorkerView
from router.traces.request_trace import RequestTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    prompt_token_s: float = 0.0
    answer_token_s: float = 0.0
    token_bytes: float = 0.0


@dataclass(kw_only=True)
class RequestWork:
    """Columns of a `LedgerRow`."""

    prefill_device_s: float = 0.0
    decode_device_s: float = 0.0
    cache_saved_device_s: float = 0.0
    speculation_saved_device_s: float = 0.0
    prefill_kv_byte_s: float = 0.0
    decode_kv_byte_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def rate_of(worker: WorkerView) -> WorkerRate:
    load, layout = worker.load, worker.info.layout if worker.info is not None else None
    devices = layout.tp if layout is not None else 1
    speed = load.prefill_tokens_per_s
    return WorkerRate(
        prompt_token_s=devices / speed if speed > 0 else 0.0,
        answer_token_s=devices * load.decode_step_s / max(1, load.num_running),
        token_bytes=layout.block_bytes / layout.block_size if layout is not None else 0.0,
    )


def num_devices(workers: Sequence[WorkerView]) -> int:
    return sum(
        worker.info.layout.tp for worker in workers if worker.info is not None and worker.state in ("ready", "draining")
    )


def work_of(
    records: Sequence[RequestTrace], uncached: int, cached: int, rates: Mapping[str, WorkerRate], now_s: float
) -> RequestWork:
    """Estimates a request's work. Choices of one prompt share its computation, which counts for the first; each holds
    the prompt's KV. An accepted draft saves the time of a token."""
    none, work, prompt_token_s = WorkerRate(), RequestWork(), 0.0
    for record in records:
        if not record.choices:
            continue
        times, decision = record.timestamps, record.choices[-1].decision
        reader = rates.get(decision.prefill or decision.decode, none)
        writer = rates.get(decision.decode, none)
        computed = min(uncached, record.num_prompt_tokens - times.num_cached_tokens)
        uncached -= computed
        prompt_token_s = reader.prompt_token_s
        work.prefill_device_s += computed * prompt_token_s
        work.decode_device_s += times.num_tokens * writer.answer_token_s
        work.drafted_tokens += times.num_drafted
        work.accepted_tokens += times.num_accepted
        work.speculation_saved_device_s += times.num_accepted * writer.answer_token_s
        first_s = now_s if times.first_s is None else times.first_s
        last_s = first_s if times.last_s is None else times.last_s
        read, prompt = (times.num_cached_tokens + record.num_prompt_tokens) / 2, record.num_prompt_tokens
        work.prefill_kv_byte_s += reader.token_bytes * read * max(0.0, first_s - record.reading.at_s)
        work.decode_kv_byte_s += writer.token_bytes * (prompt + times.num_tokens / 2) * (last_s - first_s)
    work.cache_saved_device_s = cached * prompt_token_s
    return work
