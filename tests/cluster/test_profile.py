"""`baton bench --profile` against a running cluster: what real workers tell of their steps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli.main import make_app
from tests.cluster.deployed import Deployed

pytestmark = pytest.mark.cluster

KV_OF = {"prefill-0": "KV gather", "decode-0": "KV scatter"}
LANE_OF = {"prefill-0": "KV to decode-0", "decode-0": "KV from prefill-0"}
LOAD = [
    "--set", "workload.requests=6", "--set", "workload.input_len=700", "--set", "workload.output_len=12",
    "--concurrency", "3",
]  # fmt: skip


def test_a_profile_shows_every_part_of_both_workers_steps(up: Deployed, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["bench", "--url", up.url, *LOAD, "--profile", str(path)]
    result = CliRunner(env={"COLUMNS": "100"}).invoke(make_app(arguments), arguments)
    assert result.exit_code == 0, result.output
    events = json.loads(path.read_text())["traceEvents"]
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(pids) == {"requests", "prefill-0", "decode-0"}
    for worker in ("prefill-0", "decode-0"):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pids[worker]]
        parts = {"tick", "plan", "launch", "forward", "sample", "fetch", "device", "apply", "tell", "send", "encode"}
        assert {span["name"] for span in spans} == parts | {KV_OF[worker]}
        assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
        check_nesting(spans)
        chunks = [event for event in events if event["ph"] == "b" and event["pid"] == pids[worker]]
        assert len(chunks) >= 6, "each prompt's KV has travelled"
        assert {chunk["name"] for chunk in chunks} == {LANE_OF[worker]}
        assert all(chunk["args"]["bytes"] > 0 for chunk in chunks)
    assert "while its prompt was still computed" in result.stderr
    read = [event["args"]["num_tokens"] for event in events if event["pid"] == pids["prefill-0"] and is_device(event)]
    assert sum(read) >= 6 * 700
    steps = [event for event in events if event["pid"] == pids["prefill-0"] and is_device(event)]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    sends = [event for event in events if event["ph"] == "b" and event["pid"] == pids["prefill-0"]]
    assert any(
        send["ts"] < step["ts"] + step["dur"] and step["ts"] < ends[send["id"]] for send in sends for step in steps
    ), "KV travels while more is computed"
    assert len([event for event in events if event["ph"] == "b" and event["cat"] == "request"]) == 6
    after = httpx.get(f"{up.url}/admin/profile").json()["workers"]
    assert [worker["profile"]["spans"] for worker in after] == [[], []], "nobody records any longer"


def is_device(event: dict[str, Any]) -> bool:
    return bool(event["ph"] == "X" and event["name"] == "device")


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of one thread must nest or be disjoint for a viewer."""
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        threads[span["tid"]].append(span)
    for of_thread in threads.values():
        ends: list[float] = []
        for span in sorted(of_thread, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            end = round(span["ts"] + span["dur"], 3)
            assert not ends or end <= ends[-1]
            ends.append(end)
