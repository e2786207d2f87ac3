"""Open and closed loops, on a clock that jumps: every time is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.bench.bench_load import PrefixSpan, WorkloadItem
from cluster.bench.bench_report import RequestRecord
from cluster.bench.load import run_load
from tests.unit.cluster.virtual_time import run_virtually


def items(*due_s: float | None) -> list[WorkloadItem]:
    spans = (PrefixSpan(key=(0, 0), num_tokens=1),)
    return [WorkloadItem(index=i, spans=spans, num_output=1, due_s=due) for i, due in enumerate(due_s)]


class SlowClient:
    """Takes its time over each answer; `preparing_s` of it goes by before the request can be sent."""

    def __init__(self, *answer_s: float) -> None:
        self._answer_s = answer_s
        self.num_running = 0
        self.max_running = 0
        self.prepared: list[tuple[int, float]] = []

    def prepare(self, item: WorkloadItem) -> bytes:
        self.prepared.append((item.index, asyncio.get_running_loop().time()))
        return b"%d" % item.index

    async def ask(self, item: WorkloadItem, request: bytes, *, start_s: float) -> RequestRecord:
        assert request == b"%d" % item.index
        now = asyncio.get_running_loop().time
        sent_s = now() - start_s
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(self._answer_s[item.index % len(self._answer_s)])
        finally:
            self.num_running -= 1
        return RequestRecord(
            index=item.index, due_s=item.due_s, sent_s=sent_s, arrivals_s=(now() - start_s,), num_output=1
        )


def sent(records: Sequence[RequestRecord]) -> list[float | None]:
    return [record.sent_s for record in records]


def test_an_open_loop_keeps_its_times_however_slow_the_server_is() -> None:
    client = SlowClient(100.0)
    records = run_virtually(run_load(items(0.0, 0.5, 0.5, 2.0), client))
    assert sent(records) == pytest.approx([0.0, 0.5, 0.5, 2.0])
    assert client.max_running == 4
    assert [record.late_s for record in records] == pytest.approx([0.0] * 4)


def test_a_request_is_made_before_its_time_comes() -> None:
    client = SlowClient(0.1)
    run_virtually(run_load(items(0.0, 3.0), client))
    assert client.prepared == [(0, 0.0), (1, 0.0)]


def test_a_closed_loop_sends_the_next_when_one_has_ended() -> None:
    client = SlowClient(1.0, 3.0, 1.0, 1.0, 1.0)
    records = run_virtually(run_load(items(*[None] * 5), client, concurrency=2))
    assert sent(records) == pytest.approx([0.0, 0.0, 1.0, 2.0, 3.0])
    assert client.max_running == 2


def test_records_come_in_the_order_of_requests_not_of_answers() -> None:
    records = run_virtually(run_load(items(0.0, 0.0, 0.0), SlowClient(3.0, 1.0, 2.0)))
    assert [record.index for record in records] == [0, 1, 2]


def test_progress_counts_sent_and_ended_requests() -> None:
    told: list[tuple[int, bool]] = []

    def tell(num_running: int, record: RequestRecord | None) -> None:
        told.append((num_running, record is not None))

    run_virtually(run_load(items(None, None), SlowClient(1.0), concurrency=1, tell=tell))
    assert told == [(1, False), (0, True)] * 2


def test_a_stopped_run_reports_its_figures() -> None:
    client = SlowClient(1.0, 50.0)

    async def stopped() -> list[RequestRecord]:
        run = asyncio.ensure_future(run_load(items(0.0, 0.0, 2.0, 90.0), client))
        await asyncio.sleep(10.0)
        run.cancel()
        return await run

    records = run_virtually(stopped())
    assert [record.index for record in records] == [0, 2]
    assert client.num_running == 0, "what still ran was ended"


def test_a_bug_of_ours_is_not_taken_for_a_slow_server() -> None:
    class Broken(SlowClient):
        async def ask(self, item: WorkloadItem, request: bytes, *, start_s: float) -> RequestRecord:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(run_load(items(0.0), Broken(1.0)))
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
