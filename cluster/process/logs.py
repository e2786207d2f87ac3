"""What Baton says while it runs, on stderr: lines for people, or JSON for machines. Never a prompt's text. What
somebody wants to use goes to stdout."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import IO, Any

from rich.console import Console
from rich.text import Text

ACCESS = "baton.access"
BATCH_S = 0.1  # how long lines of the access log may wait for others
MAX_WAITING = 20_000
MAX_WRITE = 4096  # what a pipe takes as a whole: lines of several processes stay whole
FIELDS = ("worker", "request", "tenant")  # of records that have them
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogConsole(Console):
    """Where the log goes. Once nobody reads it any more, as in `baton up 2>&1 | head`, this is what a terminal that is
    gone is: a hangup, which stops in order what serves. What is still said goes nowhere."""

    def on_broken_pipe(self) -> None:
        """Raises nothing: whoever logs may be in the middle of stopping, and is no place to end at."""
        if self.quiet:
            return
        self.quiet = True
        lead_nowhere(self.file)  # for what the interpreter and libraries say there
        signal.raise_signal(signal.SIGHUP)


class ResultConsole(Console):
    """stdout of a verb that goes on after it has said its piece. Whoever reads that may go, as in `baton up | head -1`:
    it is no reason to stop, nor is a disk that is full."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Markup; one line for each line of it. Nobody's terminal is assumed, and none needed."""
        try:
            self.print(text)
        except (OSError, ValueError):  # ValueError: what its encoding has no letters for
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        lead_nowhere(self.file)  # else the interpreter tries again at the end, and exits with 120


def lead_nowhere(file: IO[str]) -> None:
    """What is written there from now on is dropped, by libraries and the interpreter's end, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def terminal(log_format: LogFormat, *, access_log: bool = False) -> Console:
    """stderr, with the log going there, and a line for each request if there is to be an `access_log`."""
    console = LogConsole(stderr=True, force_terminal=False if log_format is LogFormat.JSON else None)
    set_up_log(console, log_format, access_log=access_log)
    return console


def set_up_log(console: Console, log_format: LogFormat, *, level: int = logging.INFO, access_log: bool = False) -> None:
    """Ours from `level` on, others' from WARNING on, and a line for each request with an `access_log`. A second call
    replaces the first."""
    handler: logging.Handler = JsonHandler(console) if log_format is LogFormat.JSON else TextHandler(console)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("baton").setLevel(level)
    accesses = logging.getLogger(ACCESS)
    for before in tuple(accesses.handlers):
        accesses.removeHandler(before)
        before.close()
    accesses.propagate = False
    accesses.setLevel(logging.INFO if access_log else logging.CRITICAL)
    if access_log:
        accesses.addHandler(AccessHandler(console, log_format))


class TextHandler(logging.Handler):
    """22:08:06 worker decode-0 at 127.0.0.1:40123 is ready. Through the console, so that progress bars stay whole."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
            line = Text.assemble((f"{clock} ", "dim"), (self.format(record), STYLES.get(record.levelno, "default")))
            self._console.print(line, soft_wrap=True)
        except (OSError, ValueError):
            self.handleError(record)


class JsonHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.file.write(_json(record) + "\n")
            self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()
        except (OSError, ValueError):
            self.handleError(record)


class AccessHandler(logging.Handler):
    """Formats and writes in a thread of its own, many lines at once: who is served does not wait for the log, and a
    reader that has stopped reading stops no answer. What it has no room for is counted instead."""

    def __init__(self, console: Console, log_format: LogFormat) -> None:
        super().__init__()
        self._console = console
        self._format = _json if log_format is LogFormat.JSON else _line
        self._waiting: deque[logging.LogRecord] = deque()
        self._has_some = threading.Event()
        self._writing = threading.Lock()
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._waiting.append(record)
        if not self._has_some.is_set():
            self._has_some.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Writes what waits, unless the thread is stuck in writing."""
        if self._writing.acquire(timeout=1.0):
            try:
                self._write()
            finally:
                self._writing.release()

    def _run(self) -> None:
        while True:
            self._has_some.wait()
            time.sleep(BATCH_S)
            self._has_some.clear()
            with self._writing:
                self._write()

    def _write(self) -> None:
        lines: list[str] = []
        while self._waiting:
            lines.append(self._format(self._waiting.popleft()))
        if dropped := self._num_dropped:
            self._num_dropped = 0
            told = f"{dropped} lines of the access log had no room: stderr is read too slowly"
            lines.append(self._format(logging.LogRecord(ACCESS, logging.WARNING, "", 0, told, None, None)))
        try:
            for text in _pieces(lines):
                if self._console.is_terminal:
                    self._console.print(Text(text, "dim"), soft_wrap=True)
                elif not self._console.quiet:
                    self._console.file.write(text + "\n")
                    self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()
        except (OSError, ValueError):
            pass  # there is nowhere to say so


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Several lines each, of `MAX_WRITE` bytes at most where one line has no more."""
    piece: list[str] = []
    size = 0
    for line in lines:
        num_bytes = len(line.encode("utf-8", "replace")) + 1
        if piece and size + num_bytes > MAX_WRITE:
            yield "\n".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += num_bytes
    if piece:
        yield "\n".join(piece)


def _line(record: logging.LogRecord) -> str:
    return f"{datetime.fromtimestamp(record.created).strftime('%H:%M:%S')} {record.getMessage()}"


def _json(record: logging.LogRecord) -> str:
    return json.dumps(_fields(record), ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    told: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    told |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None)}
    if (fields := getattr(record.msg, "fields", None)) is not None:
        told |= fields()
    if record.exc_info:
        told["traceback"] = logging.Formatter().formatException(record.exc_info)
    return told
