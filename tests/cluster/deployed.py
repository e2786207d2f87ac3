"""A `baton` process of its own, with everything it starts: read, asked, killed in part, and searched for remains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
# In float32, two ranks, or a batch, round as one rank and one request do: texts can be compared.
PRECISE = ("--device", "cpu", "--set", "worker.dtype=float32")
MARK = "BATON_TEST_MARK"
START_S = 300.0  # on a machine that does much else; 6 on an idle one

# More than the 64 tokens that a decode worker would read by itself.
LONG = "import os\n\n\ndef join(first, second):\n" + '    """Join two paths, inserting a separator."""\n' * 12


class Deployed:
    """Runs `baton ARGUMENTS`, behind a command of others if `before` has one; its log is kept line by line. Leave with
    `stop` or `kill`."""

    def __init__(self, *arguments: str, log_format: str = "json", before: Sequence[str] = ()) -> None:
        self._mark = uuid.uuid4().hex
        self._lines: list[str] = []
        self._turn = threading.Condition()
        self.process = subprocess.Popen(
            [
                *before,
                sys.executable,
                "-c",
                "from cluster.cli.main import main; main()",
                *arguments,
                "--log-format",
                log_format,
            ],
            env=os.environ | {MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._greeting = ""
        self._greeted = threading.Thread(target=self._read_greeting, daemon=True)
        self._greeted.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        with self._turn:
            return "\n".join(self._lines)

    @property
    def greeting(self) -> str:
        """The first line on stdout, which a JSON log leaves out. The others are not read: `baton up | head -1`."""
        self._greeted.join(START_S)
        return self._greeting

    def _read_greeting(self) -> None:
        assert self.process.stdout is not None
        self._greeting = self.process.stdout.readline()
        self.process.stdout.close()

    def wait_for(self, pattern: str, *, times: int = 1, timeout_s: float = START_S) -> re.Match[str]:
        """Returns the match of the `times`-th message with one; fails with the whole log when it does not come in
        time."""
        with self._turn:
            self._turn.wait_for(lambda: len(self._matches(pattern)) >= times or self.over, timeout_s)
            matches = self._matches(pattern)
        assert len(matches) >= times, f"{pattern!r} was said {len(matches)} times:\n{self.log}"
        return matches[times - 1]

    def count(self, pattern: str) -> int:
        """How many messages so far have a match."""
        with self._turn:
            return len(self._matches(pattern))

    @property
    def over(self) -> bool:
        return not self._reader.is_alive() or self.process.poll() is not None

    def _matches(self, pattern: str) -> list[re.Match[str]]:
        return [match for line in self._lines if (match := re.search(pattern, line))]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                told = str(json.loads(line)["message"])
            except ValueError:
                told = re.sub(r"^\d\d:\d\d:\d\d ", "", line.rstrip())  # a text log has the time before a message
            with self._turn:
                self._lines.append(told)
                self._turn.notify_all()
        with self._turn:
            self._turn.notify_all()

    # -- what it serves ------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.wait_for(r"^serving .* at (http://\S+), gRPC").group(1)

    @property
    def grpc_port(self) -> int:
        return int(self.wait_for(r"^serving .* gRPC on port (\d+)").group(1))

    def complete(self, prompt: str, *, max_tokens: int = 24, **options: Any) -> httpx.Response:
        """A greedy completion."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0} | options
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60.0)

    def text(self, prompt: str, **options: Any) -> str:
        response = self.complete(prompt, **options)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    @contextmanager
    def streaming(self, prompt: str, *, max_tokens: int) -> Iterator[Iterator[str]]:
        """A greedy answer of `max_tokens` on its way: its first token was read. Yields the data of the other events."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60.0) as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            assert response.status_code == 200, response.read()
            assert json.loads(next(events))["choices"]
            yield events

    def status(self) -> Any:
        return httpx.get(f"{self.url}/admin/status", timeout=60.0).json()

    @property
    def urls(self) -> Sequence[str]:
        ports = self.status()["processes"]
        return [re.sub(r"\d+$", str(port), self.url) for port in ports] or [self.url]

    def wait_until(self, holds: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
        """Repeats the check; fails when it does not become true in time."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, (
                f"it did not come true within {timeout_s} s; running: {self.processes()}\n{self.log}"
            )

    def metric(self, name: str, pool: str) -> float:
        told = httpx.get(f"{self.urls[0]}/metrics", timeout=60.0).text
        match = re.search(rf'^{name}{{pool="{pool}"}} (\S+)$', told, re.MULTILINE)
        assert match, f"no {name} of {pool} in:\n{told}"
        return float(match[1])

    # -- its processes -------------------------------------------------------------------------------------------------

    def worker_pids(self, worker_id: str, *, life: int = 1) -> Sequence[int]:
        """Process ids of a worker's ranks in its `life`-th life."""
        told = self.wait_for(rf"^{worker_id}: runs in process ([\d, ]+)$", times=life).group(1)
        return [int(pid) for pid in told.split(", ")]

    def processes(self) -> dict[int, str]:
        """All processes with our mark, including those that have left their family."""
        commands: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it is gone, or not ours to read
        return commands

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signals the whole process group, as a terminal does; the exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.ended()

    def ended(self, *, timeout_s: float = 60.0) -> int:
        """Waits until it has ended by itself; the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s} s:\n{self.log}") from None
        self._reader.join(timeout_s)
        self._greeted.join(timeout_s)
        return code

    def kill(self) -> None:
        """Ends every test: nothing may outlive it."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ended()
        assert self.process.stderr is not None
        self.process.stderr.close()


def completion_tokens(events: Iterator[str]) -> int:
    """Reads an answer of `Deployed.streaming` to its end and returns its number of tokens, by its usage."""
    *_, last, done = events
    assert done == "[DONE]", last
    return int(json.loads(last)["usage"]["completion_tokens"])
