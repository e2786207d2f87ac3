"""A process that does one kind of work for this one, within a limit of CPU time and memory for each request. CPU time
is limited so that the result does not depend on the machine's load."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from protos.limited import limited_server

log = logging.getLogger("baton")

PATIENCE_S = 10.0
"""A process that has not answered for this long is killed."""
START_S = 60.0
"""Python and its imports take a second of a core, which a busy machine may not have."""


class LimitedProcessEnded(Exception):
    """The process has, with this return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"return code {code}")
        self.code = code

    @property
    def took_too_long(self) -> bool:
        return self.code == -signal.SIGPROF

    @property
    def is_from_outside(self) -> bool:
        return self.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class LimitedProcess:
    """Ends with this object. `script`: see `limited_server`. Raises RuntimeError if it cannot be started."""

    def __init__(self, script: Path) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(START_S)
        with theirs:
            command = [sys.executable, "-P", str(Path(limited_server.__file__)), str(script)]
            devnull = subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=devnull, stderr=devnull)
        weakref.finalize(self, _end, self.process, self._ours)
        try:
            self._read()
        except OSError as error:
            raise RuntimeError(f"the process does not start: {command}") from error
        self._ours.settimeout(PATIENCE_S)

    def ask(self, request: bytes, cpu_s: float) -> bytes:
        """Raises LimitedProcessEnded if the process died; TimeoutError if it was killed because it did not answer."""
        try:
            self._ours.sendall(limited_server.HEAD.pack(len(request), round(cpu_s * 1000)) + request)
            return self._read()
        except TimeoutError:
            log.warning("a process has not answered %d bytes in %g s: it is ended", len(request), PATIENCE_S)
            self.process.kill()
            _end(self.process, self._ours)
            raise
        except OSError:
            _end(self.process, self._ours)
            code = self.process.returncode
            log.warning("a process has ended over a request of %d bytes: return code %d", len(request), code)
            raise LimitedProcessEnded(code) from None

    def _read(self) -> bytes:
        """An answer. Raises OSError when it has died."""
        parts = bytearray()
        missing = limited_server.ANSWER.size
        while len(parts) < missing:
            part = self._ours.recv(missing - len(parts))
            if not part:
                raise ConnectionResetError
            parts += part
            if len(parts) == limited_server.ANSWER.size:
                missing += limited_server.ANSWER.unpack(parts)[0]
        return bytes(parts[limited_server.ANSWER.size :])


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    if process.returncode is None:
        try:
            process.wait(timeout=0.5)  # a dead process leaves its cause
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
