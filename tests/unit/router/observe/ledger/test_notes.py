"""Notes of requests that are being answered: enough for a killed process, few enough for the gateway's CPU time."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.values import SamplingParams
from router.jobs import Job
from router.observe.ledger import ledger_store as store_module
from router.observe.ledger import request_ledger as ledger_module
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.ledger.rows import OpenRequest, Written
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.text.sampling_request import TextRequest
from router.text.text_stream import UsageCounter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def asked(name: str) -> TextRequest:
    job = Job(request_id=name, group_id=name, prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    return TextRequest(request_id=name, jobs=(job,), n=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledger_module, "loop_time", made)
    return made


def ledger_of(store: Any) -> RequestLedger:
    fleet = cast(Any, SimpleNamespace(status=list))
    return RequestLedger(cast(LedgerStore, store), PriceList(), fleet, model="demo")


def test_a_request_is_noted_after_a_second_then_every_two(clock: Clock) -> None:
    written: list[Written] = []
    ledger, ask = ledger_of(SimpleNamespace(write=written.append)), asked("r")
    counted = UsageCounter(ask)
    request = ObservedRequest(ask, [], counted, "completions", "", "demo")
    ledger.began(request)
    noted = []
    for second in range(8):
        clock.now = 1000.0 + second + 0.01 * (second % 2)  # looks are not made to the millisecond
        ledger.note_open()
        noted.append(len(written))
    assert noted == [0, 1, 1, 2, 2, 3, 3, 4]
    assert all(isinstance(record, OpenRequest) for record in written)
    ledger.ended(EndedRequest.of(request, None))
    clock.now += 100.0
    ledger.note_open()
    assert len(written) == noted[-1] + 1, "the row, and no note after it"


def test_rows_are_gathered_and_closing_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(store_module, "GATHER_S", 3600.0)
    path, transactions = tmp_path / "ledger.db", list[int]()
    commit = LedgerStore._commit

    def counted(self: LedgerStore, rows: Sequence[Written]) -> None:
        transactions.append(len(rows))
        commit(self, rows)

    monkeypatch.setattr(LedgerStore, "_commit", counted)
    store = LedgerStore(ledger_database(path))
    ledger = ledger_of(store)
    for name in ("a", "b", "c"):
        ask = asked(name)
        ledger.ended(EndedRequest.of(ObservedRequest(ask, [], UsageCounter(ask), "completions", "", "demo"), None))
    store.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM requests").fetchone() == (3,)
    assert transactions == [3]
