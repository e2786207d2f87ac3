"""The worker that live overload is measured with: it makes what was asked, in its model's time, and leaks nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gateway.paced_worker import PacedEngine, StepCost
from protos.values import FinishReason, GenerateRequest, SamplingParams

PACE = StepCost(max_running=3, num_blocks=60)


def test_every_request_gets_its_tokens_and_gives_its_blocks_back() -> None:
    engine, made, ended = PacedEngine(PACE), Counter[str](), dict[str, float]()
    for number in range(8):
        sampling = SamplingParams(max_tokens=4 + number)
        engine.submit(GenerateRequest(request_id=f"r{number}", prompt_ids=tuple(range(200)), sampling=sampling))
    assert engine.load().queued_prefill_tokens == 1600
    engine.abort("r5")
    now = 0.0
    while (plan := engine.plan()).writing or plan.reading:
        seconds = PACE(plan.num_read, len(plan.writing))
        now += seconds
        for update in engine.apply(plan, seconds).updates:
            made[update.request_id] += len(update.token_ids)
            if update.finish_reason is FinishReason.LENGTH:
                ended[update.request_id] = now
        load = engine.load()
        assert load.num_running <= 3
        assert 0 <= load.num_free_blocks <= PACE.num_blocks
        if "r1" in engine.running and made["r1"] == 2:
            engine.abort("r1")
    assert made == {"r0": 4, "r1": 2, "r2": 6, "r3": 7, "r4": 8, "r6": 10, "r7": 11}
    assert [*ended] == ["r0", "r2", "r3", "r4", "r6", "r7"], "first come, first served"
    assert engine.load().num_free_blocks == PACE.num_blocks
    assert load.prefill_tokens_per_s == pytest.approx(1 / PACE.token_s, rel=0.8)
    assert load.decode_step_s > PACE.step_s
