"""A real Redis for a test, on a port of its own."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path


class RedisServer:
    """On a port of its own, without files; it can be stopped and started again, empty, and be paused. With `config`, a
    file of its own, it is a Sentinel."""

    def __init__(self, folder: Path, *options: str, config: Path | None = None) -> None:
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        kind = ["redis-server", str(config), "--sentinel"] if config else ["redis-server", "--save", ""]
        self._command = [*kind, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
        self._process: subprocess.Popen[str] | None = None

    def add(self, *options: str) -> None:
        """More options, for the next start."""
        self._command += options

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert any("Ready to accept connections" in line or "+monitor" in line for line in self._process.stdout)

    def pause(self) -> None:
        """Stops the process, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def _free_port() -> int:
    """A port below the kernel's ephemeral ones, as its cluster bus is (10,000 above), so that no process takes it from
    a restarting Redis."""
    while True:
        port = random.randrange(10_000, 22_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
