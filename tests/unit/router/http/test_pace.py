"""A gateway that cannot keep up writes less often; one that can writes every token by itself."""

from __future__ import annotations

import asyncio

import pytest

from protos.errors import WorkerLost
from protos.values import ErrorInfo, FinishReason, SequenceUpdate
from router.fleet.worker_client import Updates
from router.http.pace import MAX_GAP_S, Pace


class Clock:
    """The loop's time, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self._now_s)

    async def move(self, seconds: float) -> None:
        self._now_s += seconds
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_loop_that_is_on_time_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    with pace.running():
        for _ in range(100):
            await clock.move(pace.period_s)
            assert pace.gap_s == 0.0


async def test_a_late_loop_waits_longer_the_later_it_is_and_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    with pace.running():
        gaps = []
        for lateness_s in (0.003, 0.01, 1.0):
            for _ in range(50):
                await clock.move(pace.period_s + lateness_s)
            gaps.append(pace.gap_s)
        assert 0.003 < gaps[0] < gaps[1] < gaps[2] == MAX_GAP_S
        for _ in range(100):
            await clock.move(pace.period_s)
        assert pace.gap_s == 0.0


async def test_an_answer_that_cannot_be_written_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, pace, flushed = Clock(monkeypatch), Pace(), list[float]()

    def fails(now: float) -> bool:
        raise RuntimeError("the transport is closed")

    def stays(now: float) -> bool:
        flushed.append(now)
        return True

    with pace.running():
        pace.when_due(fails)
        pace.when_due(stays)
        for _ in range(50):
            await clock.move(1.0)
        assert pace.gap_s == MAX_GAP_S
        for _ in range(100):
            await clock.move(pace.period_s)
        assert pace.gap_s == 0.0
    assert len(flushed) == 150
    assert [record.exc_info is not None for record in caplog.records] == [True], "told once"


async def test_nothing_is_looked_at_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    with pace.running():
        for _ in range(50):
            await clock.move(1.0)
        with pace.running():
            pass
        assert pace.gap_s > 0
    await clock.move(10.0)
    assert pace.gap_s == 0.0


def token(token_id: int, **others: object) -> SequenceUpdate:
    return SequenceUpdate(request_id="r", token_ids=(token_id,), **others)  # type: ignore[arg-type]


async def test_who_reads_late_gets_all_that_waits_at_once() -> None:
    updates = Updates()
    for update in (token(1, num_cached_tokens=7), token(2), token(3, finish_reason=FinishReason.STOP)):
        updates.put(update)
    assert [update async for update in updates] == [
        SequenceUpdate(request_id="r", token_ids=(1, 2, 3), num_cached_tokens=7, finish_reason=FinishReason.STOP)
    ]


async def test_who_reads_in_time_gets_every_token_by_itself() -> None:
    updates, seen = Updates(), list[tuple[int, ...]]()

    async def read() -> None:
        seen.extend([update.token_ids async for update in updates])

    reading = asyncio.create_task(read())
    for token_id in range(3):
        updates.put(token(token_id, finish_reason=FinishReason.LENGTH if token_id == 2 else None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await reading
    assert seen == [(0,), (1,), (2,)]


async def test_other_events_are_not_joined_to_tokens() -> None:
    refusal = SequenceUpdate(request_id="r", error=ErrorInfo(code="overloaded", message="no room to move to"))
    updates = Updates()
    for update in (token(1), token(2), refusal, token(3), token(4, finish_reason=FinishReason.MOVED)):
        updates.put(update)
    updates.fail(WorkerLost("gone"))
    seen = [await anext(updates) for _ in range(3)]
    assert [(output.token_ids, output.finish_reason) for output in seen] == [
        ((1, 2), None),
        ((), None),
        ((3, 4), FinishReason.MOVED),
    ]


async def test_tokens_before_a_loss_are_told_before_it() -> None:
    updates = Updates()
    updates.put(token(1))
    updates.put(token(2))
    updates.fail(WorkerLost("gone"))
    assert (await anext(updates)).token_ids == (1, 2)
    with pytest.raises(WorkerLost):
        await anext(updates)
