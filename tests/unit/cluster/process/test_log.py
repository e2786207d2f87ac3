"""The reader of a serving verb's stdout may go, and the verb continues."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from cluster.process import logs
from cluster.process.logs import ACCESS, MAX_WRITE, AccessHandler, JsonHandler, LogFormat
from router.http.access_log import Access

PROGRAM = """
import sys
from cluster.process.logs import ResultConsole
for _ in range(2):
    ResultConsole().say("[bold]demo[/] at http://127.0.0.1:8000, and " + 200 * "more, ")
print("serves", file=sys.stderr)
"""


def test_on_a_pipe_it_is_one_plain_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    told = "demo at http://127.0.0.1:8000, and " + 200 * "more, "
    assert done.stdout.splitlines() == [told, told]


@pytest.mark.parametrize("stdout", ["a pipe that nobody reads", "a full disk", "none"])
def test_that_it_cannot_be_said_ends_nothing(stdout: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    if stdout == "none":
        command = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
    with open(_nowhere() if stdout == "a pipe that nobody reads" else "/dev/full", "w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "serves\n")


def access(**facts: Any) -> logging.LogRecord:
    usual: dict[str, Any] = {"method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0.5}
    made = Access(**usual | facts)
    return logging.LogRecord(ACCESS, logging.INFO, "", 0, made, None, None)


def test_lines_of_the_access_log_have_fields_in_json() -> None:
    file = io.StringIO()
    handler = AccessHandler(Console(file=file), LogFormat.JSON)
    for number in range(100):
        handler.emit(access(request=f"r{number}", tenant="acme", prompt_tokens=3, output_tokens=number))
    handler.emit(access(status=400))
    handler.flush()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line.get("request") for line in lines] == [*(f"r{number}" for number in range(100)), None]
    told = {name: lines[7][name] for name in ("logger", "level", "method", "path", "status", "tenant", "output_tokens")}
    assert told == {
        "logger": "baton.access", "level": "info", "method": "POST", "path": "/v1/completions", "status": 200,
        "tenant": "acme", "output_tokens": 7,
    }  # fmt: skip
    assert "tenant" not in lines[-1]


def test_lines_for_people_are_whole_for_each_write() -> None:
    writes: list[str] = []

    class File(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    handler = AccessHandler(Console(file=File()), LogFormat.TEXT)
    for number in range(200):
        handler.emit(access(request=f"r{number}", client="127.0.0.1"))
    handler.flush()
    assert all(text.endswith("\n") and len(text) <= MAX_WRITE for text in writes)
    lines = "".join(writes).splitlines()
    assert len(lines) == 200
    assert lines[7][9:] == "POST /v1/completions 200 in 0.5000 s, 127.0.0.1, r7"


def test_a_log_that_is_not_read_stops_nothing_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    file = io.StringIO()
    handler = AccessHandler(Console(file=file), LogFormat.JSON)
    with handler._writing:
        for _ in range(30):
            handler.emit(access())
    handler.flush()
    lines = [json.loads(line)["message"] for line in file.getvalue().splitlines()]
    assert len(lines) == 11
    assert lines[-1] == "20 lines of the access log had no room: stderr is read too slowly"


def test_events_name_their_worker_or_request_in_json() -> None:
    file = io.StringIO()
    handler = JsonHandler(Console(file=file))
    record = logging.LogRecord("baton.router", logging.WARNING, "", 0, "%s fails", ("d0",), None)
    record.worker, record.request = "d0", "r1"
    handler.emit(record)
    told = json.loads(file.getvalue())
    assert (told["message"], told["worker"], told["request"]) == ("d0 fails", "d0", "r1")
    assert "tenant" not in told


def _nowhere() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
