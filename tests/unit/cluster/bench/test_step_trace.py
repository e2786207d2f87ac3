"""`baton bench --profile`: a trace that a viewer can open, of the workers that answered, for administrators only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from cluster.bench.step_trace import chrome_trace
from cluster.cli.main import make_app
from protos.errors import Misconfigured, Unauthenticated
from protos.values import KVPiece, Profile, Span, WorkerRole
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from tests.unit.cluster.cli.test_status_verb import info
from tests.unit.router.scripted import Crew, Scripted, Worker, make_gateway, saying, serving

ADMIN, ACME = "sk-baton-admin", "sk-baton-acme"
LOAD = [
    "--set", "workload.input_len=8", "--set", "workload.output_len=4", "--set", "workload.requests=3",
    "--concurrency", "1",
]  # fmt: skip
SPANS = (
    Span(name="plan", start_s=10.0, duration_s=0.001, depth=1),
    Span(name="forward", start_s=10.002, duration_s=0.003, num_rows=2, num_tokens=9),
    Span(name="launch", start_s=10.001, duration_s=0.0045, step=1, num_rows=2, num_tokens=9),
    Span(name="device", start_s=10.001, duration_s=0.005, step=1, num_rows=2, num_tokens=9),
    Span(name="send", start_s=10.007, duration_s=0.0, num_rows=2),
)


PIECE = KVPiece(
    peer="decode-1#7", ticket_id="r", num_bytes=2_000_000, first_block=0, num_blocks=4, first_layer=2, num_layers=1
)
KV_SPANS = (
    Span(name="KV gather", start_s=10.0021, duration_s=0.0001, kv=PIECE),
    Span(name="KV send", start_s=10.0025, duration_s=0.003, kv=replace(PIECE, hidden_s=0.003)),
    Span(name="KV send", start_s=10.0055, duration_s=0.001, kv=PIECE),
    Span(name="KV receive", start_s=10.004, duration_s=0.002, kv=replace(PIECE, peer="prefill-0#1")),
    Span(name="KV receive", start_s=10.005, duration_s=0.002, kv=replace(PIECE, peer="prefill-0#1")),
)


def crew() -> Crew:
    made = Crew(Worker(info=info("decode-0", WorkerRole.DECODE)), Worker(worker_id="mute"))
    made.profiles["decode-0"] = Profile(spans=SPANS, wall_offset_s=1_000_000.0, num_dropped=7)
    return made


async def bench(fleet: Crew, *flags: str, tenants: Path | None = None) -> Result:
    gateway = make_gateway(Scripted(saying("abcdefgh")), fleet=fleet, access=AccessControl(tenants))
    async with serving(gateway) as url:
        arguments = ["bench", "--url", url, *LOAD, *flags]
        runner = CliRunner(env={"COLUMNS": "100"})
        return await asyncio.to_thread(runner.invoke, make_app(arguments), arguments)


async def test_a_load_is_recorded_with_the_workers_steps(tmp_path: Path) -> None:
    fleet, path = crew(), tmp_path / "trace.json"
    result = await bench(fleet, "--profile", str(path))
    assert result.exit_code == 0, result.output
    assert fleet.recording == [True, True, False, False], "both workers, before and after"
    assert "mute did not answer" in result.stderr
    assert "decode-0 has kept its latest spans only: 7 are missing" in result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["requests", "decode-0"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [span.name for span in SPANS]
    assert [event["ph"] for event in events if event.get("cat") == "request"] == ["b", "n", "e"] * 3


def test_spans_nest_and_counters_return_to_zero() -> None:
    told = [{"worker_id": "w", "profile": {"wall_offset_s": 1.7e9 + 1 / 3, "num_dropped": 0, "spans": plain(SPANS)}}]
    events = chrome_trace(told)["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert min(event["ts"] for event in spans.values()) == pytest.approx(0.0, abs=1.0)
    assert all(event["dur"] >= 0 for event in spans.values())
    inner, outer = spans["forward"], spans["launch"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert inner["tid"] == outer["tid"] != spans["device"]["tid"]
    assert spans["device"]["args"] == {"step": 1, "num_rows": 2, "num_tokens": 9}
    counted = [(event["name"], *event["args"].values()) for event in events if event["ph"] == "C"]
    assert counted == [("rows", 2), ("rows", 0), ("tokens", 9), ("tokens", 0)]


def test_kv_on_its_way_stands_beside_the_steps_by_lane() -> None:
    told = [{"worker_id": "w", "profile": {"wall_offset_s": 0.0, "num_dropped": 0, "spans": plain(SPANS + KV_SPANS)}}]
    events = chrome_trace(told)["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert [event["name"] for event in begun] == ["KV to decode-1"] * 2 + ["KV from prefill-0"] * 2
    assert [event["id"] for event in begun] == [event["id"] for event in events if event["ph"] == "e"]
    assert len({event["id"] for event in begun}) == 4, "spans of several ranks overlap"
    assert begun[0]["args"] == {
        "peer": "decode-1#7", "ticket": "r", "blocks": "0-3", "layers": "2", "bytes": 2_000_000, "hidden_ms": 3.0,
    }  # fmt: skip
    assert "KV gather" in [event["name"] for event in events if event["ph"] == "X"]


async def test_how_much_of_the_transfers_was_hidden_is_said(tmp_path: Path) -> None:
    fleet = crew()
    fleet.profiles["decode-0"] = Profile(spans=SPANS + KV_SPANS)
    result = await bench(fleet, "--profile", str(tmp_path / "trace.json"))
    assert "KV: 4.0 MB in 4.0 ms on lanes, 75% of it while its prompt was still computed" in result.stderr


def test_workers_with_different_clocks_are_aligned() -> None:
    worker = {
        "wall_offset_s": 1000.0,
        "num_dropped": 0,
        "spans": plain([Span(name="plan", start_s=5.0, duration_s=1.0)]),
    }
    other = {
        "wall_offset_s": 5.0,
        "num_dropped": 0,
        "spans": plain([Span(name="plan", start_s=1001.0, duration_s=1.0)]),
    }
    told = [{"worker_id": "one", "profile": worker}, {"worker_id": "other", "profile": other}]
    starts = [event["ts"] for event in chrome_trace(told)["traceEvents"] if event["ph"] == "X"]
    assert starts == [0.0, 1_000_000.0]


def test_a_trace_of_nothing_can_be_opened_too() -> None:
    assert chrome_trace([{"worker_id": "w", "profile": None}])["traceEvents"]


async def test_where_keys_are_asked_for_it_takes_an_administrators(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'admin_keys = ["{hash_of(ADMIN)}"]\n[tenants.acme]\nkeys = ["{hash_of(ACME)}"]\n')
    fleet, path = crew(), str(tmp_path / "trace.json")
    refused = await bench(fleet, "--api-key", ACME, "--profile", path, tenants=tenants)
    assert isinstance(refused.exception, Unauthenticated)
    assert not fleet.recording
    taken = await bench(fleet, "--api-key", ACME, "--admin-key", ADMIN, "--profile", path, tenants=tenants)
    assert taken.exit_code == 0, taken.output
    assert fleet.recording


async def test_a_file_that_cannot_be_written_is_said_before_the_load() -> None:
    fleet = crew()
    result = await bench(fleet, "--profile", "/nowhere/at/all.json")
    assert isinstance(result.exception, Misconfigured)
    assert "--profile /nowhere/at/all.json" in str(result.exception)
    assert not fleet.recording


def plain(spans: Sequence[Span]) -> Any:
    return orjson.loads(orjson.dumps(spans))
