"""How far a prompt is read, for whoever asked to be told."""

from __future__ import annotations

from tests.unit.workers.harness import ToyEngine, ask


def test_how_far_a_prompt_is_read_is_told_when_asked_for() -> None:
    toy, prompt = ToyEngine(prefill_chunk=8), range(100, 121)
    toy.submit(ask("told", prompt, 2, tells_progress=True))
    updates = toy.step(4)
    assert [update.num_prompt_computed for update in updates] == [8, 16, 21, 0]
    toy.submit(
        ask("cached", [*range(100, 120), *range(200, 210)], 1, tells_progress=True), ask("silent", range(300, 321), 1)
    )
    updates = toy.step(6)
    told = [
        (update.num_prompt_computed, update.num_cached_tokens) for update in updates if update.request_id == "cached"
    ]
    assert told == [(28, 20), (30, 20)]
    assert [len(update.token_ids) for update in updates if update.request_id == "silent"] == [1]
    toy.finish()
