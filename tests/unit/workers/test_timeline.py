"""A timeline shows an engine's steps, and keeps nothing and reads no clock while nobody asks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from protos.values import Span
from tests.unit.workers.harness import ToyEngine, ask, by_hand
from workers.batch import Batch, PendingStep, Row
from workers.runner.torch_runner import DeviceClock
from workers.timeline import Timeline


def ticking(capacity: int = 100) -> Timeline:
    ticks = count()
    return Timeline(lambda: float(next(ticks)), capacity=capacity)


def run(toy: ToyEngine) -> None:
    toy.submit(ask("r", range(10), 6), ask("s", range(20, 30), 6))
    while toy.engine.has_work():
        toy.step()


def test_nothing_is_recorded_before_a_request() -> None:
    timeline = Timeline(lambda: pytest.fail("nobody asked for the time"))
    with timeline.span("plan"):
        pass
    timeline.add("device", 0.0, 1.0)
    assert not timeline.recording
    assert timeline.record() == ((), 0)


def test_a_full_ring_keeps_the_latest_and_counts_the_rest() -> None:
    timeline = ticking(capacity=3)
    timeline.record(True)
    for step in range(1, 6):
        with timeline.span("plan", step=step):
            pass
    spans, num_dropped = timeline.record()
    assert ([span.step for span in spans], num_dropped) == ([3, 4, 5], 2)
    assert spans[0] == Span(name="plan", start_s=4.0, duration_s=1.0, step=3)


def test_a_batch_is_counted_once_for_all_its_spans() -> None:
    """Rows are many: whoever times a step must not make it longer."""

    class Rows(tuple[Row, ...]):
        num_looks = 0

        def __iter__(self) -> Iterator[Row]:
            Rows.num_looks += 1
            return super().__iter__()

    timeline = ticking()
    timeline.record(True)
    batch = Batch(rows=Rows([Row(request_id="r", start=5, token_ids=(1, 2), block_tables=((0,),))]))
    with timeline.span("launch", batch):
        pass
    num_looks = Rows.num_looks
    assert num_looks
    with timeline.span("apply", batch):
        pass
    assert Rows.num_looks == num_looks
    told = [(entry.num_rows, entry.num_tokens, entry.num_read, entry.num_attended) for entry in timeline.record()[0]]
    assert told == [(1, 2, 7, 13)] * 2


def test_a_recording_ends_with_its_spans_and_restarts_empty() -> None:
    timeline = ticking()
    timeline.record(True)
    with timeline.span("tick"):
        pass
    assert len(timeline.record(False)[0]) == 1
    with timeline.span("tick"):
        pass
    assert timeline.record(True) == ((), 0)
    assert timeline.record() == ((), 0)


def test_a_span_that_outlasts_the_recording_is_left_out() -> None:
    timeline = ticking()
    timeline.record(True)
    with timeline.span("tick"):
        timeline.record(False)
    assert timeline.record() == ((), 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_step_is_seen_once_in_each_of_its_parts(depth: int) -> None:
    toy = ToyEngine(depth=depth)
    toy.engine.timeline.record(True)
    run(toy)
    spans, num_dropped = toy.engine.timeline.record(False)
    assert num_dropped == 0
    steps = list(range(1, toy.engine.num_steps + 1))
    for name in ("launch", "fetch", "device", "apply"):
        seen = [span for span in spans if span.name == name]
        assert [span.step for span in seen] == steps
        assert all(0 < span.num_rows <= span.num_tokens for span in seen)
    assert sum(span.num_tokens for span in spans if span.name == "device") >= 20
    assert max(span.depth for span in spans) == depth


@pytest.mark.parametrize("depth", [0, 1])
def test_parts_and_device_times_never_overlap(depth: int) -> None:
    toy = ToyEngine(depth=depth)
    toy.engine.timeline.record(True)
    run(toy)
    spans, _ = toy.engine.timeline.record(False)
    for lane in ({"device"}, {"tick", "plan", "launch", "fetch", "apply"}):
        end_s = 0.0
        for span in sorted((span for span in spans if span.name in lane), key=lambda span: span.start_s):
            assert span.start_s >= end_s
            assert span.duration_s >= 0
            end_s = span.start_s + span.duration_s


def test_recording_changes_no_token() -> None:
    toy = ToyEngine(depth=1)
    toy.engine.timeline.record(True)
    run(toy)
    assert toy.answers["r"].token_ids == by_hand(range(10), 6)
    assert toy.answers["s"].token_ids == by_hand(range(20, 30), 6)


class Device:
    """A queue of marks, each of which the device passes a second after the one before, by a clock of its own."""

    def __init__(self) -> None:
        self.now_ms = 7_000.0

    def mark(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.passed_ms = 0.0
        self.waited = False

    def record(self) -> None:
        self._device.now_ms += 1_000.0
        self.passed_ms = self._device.now_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Mark) -> float:
        assert self.waited
        assert later.waited or later.passed_ms < self._device.now_ms, "nobody knows yet when it is passed"
        return later.passed_ms - self.passed_ms


def test_a_device_that_keeps_time_is_believed() -> None:
    """Its clock is brought together with the host's once, and not again for every step."""
    device, clock = Device(), DeviceClock(lambda: 100.0, event=lambda: device.mark())
    steps = []
    for _ in range(2):
        steps.append(clock.begin())
        steps[-1].stop()
    assert [step.span() for step in steps] == [(101.0, 102.0), (103.0, 104.0)]


def test_a_devices_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyEngine(depth=1)
    launch = toy.engine._pipeline.launch

    class Known:
        def __init__(self, pending: PendingStep) -> None:
            self.fetch = pending.fetch

        def device_span(self) -> tuple[float, float]:
            return 5.0, 7.5

    monkeypatch.setattr(toy.engine._pipeline, "launch", lambda batch: Known(launch(batch)))
    toy.engine.timeline.record(True)
    run(toy)
    spans, _ = toy.engine.timeline.record(False)
    assert {(span.start_s, span.duration_s) for span in spans if span.name == "device"} == {(5.0, 2.5)}
