"""The usage of a request, computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.values import SamplingParams
from router.jobs import Job
from router.observe.ledger.costing import WorkerRate, work_of
from router.routing.decision import Decision
from router.traces.request_trace import RequestTrace


def trace() -> RequestTrace:
    """A prompt of 100 tokens, 20 of them cached, routed at 1 s; its first token at 3 s, the last of 10 at 8 s."""
    job = Job(request_id="r", group_id="r", prompt_ids=tuple(range(100)), sampling=SamplingParams(max_tokens=10))
    record = RequestTrace(job=job, received_s=0.0)
    choice = SimpleNamespace(at_s=1.0, decision=Decision(policy="slo", prefill="p", decode="d"))
    record.choices.append(cast(Any, choice))
    record.took(1, 20, 3.0)
    record.took(9, 20, 8.0)
    record.verified(6, 4)
    return record


def test_device_seconds_and_kv_follow_the_phases() -> None:
    rates = {
        "p": WorkerRate(prompt_token_s=0.01, answer_token_s=9.0, token_bytes=1000.0),
        "d": WorkerRate(prompt_token_s=9.0, answer_token_s=0.1, token_bytes=2000.0),
    }
    work = work_of([trace()], 80, 20, rates, 9.0)
    assert (work.prefill_device_s, work.decode_device_s) == pytest.approx((0.8, 1.0))
    assert (work.cache_saved_device_s, work.speculation_saved_device_s) == pytest.approx((0.2, 0.4))
    assert work.prefill_kv_byte_s == 1000.0 * 60 * 2.0
    assert work.decode_kv_byte_s == 2000.0 * 105 * 5.0
    assert (work.drafted_tokens, work.accepted_tokens) == (6, 4)
    assert work_of([trace()], 80, 20, {}, 9.0).decode_kv_byte_s == 0.0, "a worker that left"


def test_an_early_end_holds_the_prompts_kv() -> None:
    record = trace()
    record.timestamps.first_s = record.timestamps.last_s = None
    work = work_of([record], 100, 0, {"p": WorkerRate(token_bytes=1.0)}, 5.0)
    assert (work.prefill_kv_byte_s, work.decode_kv_byte_s) == (60 * 4.0, 0.0)
