"""`baton scale`, `baton flip` and `baton roll`: what they send, wait for and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli.change import fleet_verbs
from cluster.cli.change.drain_verb import until
from protos.errors import DeadlineExceeded, InvalidRequest, Misconfigured, Unavailable

BEFORE, AFTER = {"counts": {"prefill": 1, "decode": 1}}, {"counts": {"prefill": 1, "decode": 3}}


def change(state: str = "under way", number: int = 4, reason: str = "") -> dict[str, Any]:
    return {
        "number": number, "kind": "scale", "who": "ann", "why": "", "before": BEFORE, "after": AFTER, "at_s": 10.0,
        "ended_s": 12.5, "worker_id": "", "state": state, "reason": reason,
    }  # fmt: skip


def view(state: str, *waiting: str, reason: str = "") -> dict[str, Any]:
    desired = BEFORE if state == "failed" else AFTER
    return {"desired": desired, "serving": {}, "waiting_for": waiting, "changes": [change(state, reason=reason)]}


def wait(*views: dict[str, Any], timeout_s: float = 60.0) -> list[str]:
    answers, shown, now = list(views), list[str](), iter(range(1000))
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers.pop(0)))
    with httpx.Client(transport=transport, base_url="http://gateway") as client:
        until(
            lambda: fleet_verbs._look(client, change()), timeout_s=timeout_s, show=shown.append, goes_on="",
            clock=lambda: next(now), sleep=lambda _: None,
        )  # fmt: skip
    return shown


def test_it_waits_with_progress_until_the_fleet_is_reached() -> None:
    assert wait(view("under way", "decode-1 to serve", "decode-2 to serve"), view("reached")) == [
        "fleet is to be 1 prefill + 3 decode: waiting for decode-1 to serve, decode-2 to serve",
        "the fleet is 1 prefill + 3 decode, after 2.5 s",
    ]


def test_a_failed_replaced_or_slow_change_is_an_error() -> None:
    with pytest.raises(Unavailable, match=r"no weights in there; the fleet stays 1 prefill \+ 1 decode"):
        wait(view("failed", reason="no weights in there"))
    aborted = "ann aborts it with change 5; the fleet is to be 1 prefill"
    with pytest.raises(InvalidRequest, match=aborted):
        wait(view("replaced", reason="ann aborts it with change 5"))
    with pytest.raises(DeadlineExceeded, match=r"after 1 s: .*decode-1 to serve"):
        wait(*[view("under way", "decode-1 to serve")] * 3, timeout_s=1.0)


def test_an_order_is_sent_with_who_gives_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(json.loads(request.content))
            return httpx.Response(202, json=change())
        return httpx.Response(200, json=view("under way"))

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(fleet_verbs, "open_client", lambda *_: httpx.Client(transport=transport, base_url="http://g"))
    fleet_verbs.scale(["decode=3"], no_wait=True, why="a sale")
    fleet_verbs.flip("decode-1", "prefill", no_wait=True)
    fleet_verbs.roll("./models/new", ["worker.prefill_chunk=256", "lanes.checksum=true"], surge=0, no_wait=True)
    fleet_verbs.roll(abort=True, no_wait=True, why="worse answers")
    assert sent[2:] == [
        {
            "who": fleet_verbs.who(), "kind": "roll", "model": str(Path("./models/new").absolute()), "surge": 0,
            "why": "",
            "settings": {"worker.prefill_chunk": 256, "lanes.checksum": True},
        },
        {"who": fleet_verbs.who(), "kind": "abort", "why": "worse answers"},
    ]  # fmt: skip
    assert sent[:2] == [
        {"who": fleet_verbs.who(), "kind": "scale", "counts": {"decode": 3}, "why": "a sale"},
        {"who": fleet_verbs.who(), "kind": "flip", "worker_id": "decode-1", "role": "prefill", "why": ""},
    ]
    assert capsys.readouterr().out.splitlines()[0] == "change 4: 1 prefill + 1 decode -> 1 prefill + 3 decode"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["reader=2"], "reader=2: 'reader' is no role: give one of prefill, decode, colocated, as decode=3"),
        (["decode"], "decode: '' is no number of workers: give one from 0 to 4096, as decode=2"),
        (["decode=-1"], "decode=-1: '-1' is no number of workers"),
        (["decode=1", "decode=2"], "decode=2: decode is given twice"),
    ],
)
def test_an_invalid_count_is_refused_with_a_fix(given: list[str], message: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        fleet_verbs.parse_counts(given)
    assert refused.value.message.startswith(message)


def test_a_role_that_no_worker_can_change_into_is_refused() -> None:
    with pytest.raises(Misconfigured, match="flip decode-1 colocated: give prefill or decode"):
        fleet_verbs.flip("decode-1", "colocated")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing is to change: give --model, --set or --abort"),
        ({"abort": True, "model": "/models/new"}, "--abort and --model or --set are both given"),
        ({"settings": ["worker.dtype"]}, "--set worker.dtype: write it as NAME=VALUE"),
    ],
)
def test_a_roll_shows_its_changes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        fleet_verbs.roll(**options)
