"""Another engine in a process of its own environment (benchmarks/peers/): it computes a round whenever it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.floors import TokenLoad

PEERS = Path(__file__).resolve().parents[1] / "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """Seconds until all was answered, those of the cores, and each request's seconds to its first token."""

    seconds: float
    cpu_s: float
    ttft_s: list[float]


class PeerProcess:
    """Its `version`, and its rounds of the workloads that it was opened with."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version: str = self._answer("version")

    def round(self) -> list[EngineRun]:
        """A run of each workload. Between rounds the process is stopped, so that it takes nothing of the cores."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        runs = [EngineRun(**run) for run in self._answer("runs")]
        os.killpg(self._process.pid, signal.SIGSTOP)
        return runs

    def _answer(self, key: str) -> Any:
        """Of the next line of JSON that has it: engines print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{key}"'):
                return json.loads(line)[key]
        raise RuntimeError(f"{self._process.args!r} ended with status {self._process.wait()}: its errors are above")


@contextmanager
def peer_process(
    python: Path,
    script: str,
    model: Path,
    workloads: Sequence[TokenLoad],
    num_threads: int,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """Raises RuntimeError where it ends before it has answered."""
    loads = json.dumps([{k: v for k, v in asdict(workload).items() if k != "name"} for workload in workloads])
    command = [str(python), str(PEERS / script), str(model), loads, str(num_threads), *more]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | dict(environment or {}),
        start_new_session=True,
    ) as process:
        try:
            yield PeerProcess(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends what is stopped
