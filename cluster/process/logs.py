"""Logs on stderr: lines for people, or JSON for machines; never the text of a prompt. Results go to stdout."""

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
BATCH_S = 0.1  # longest time that a line of the access log is buffered
MAX_WAITING = 20_000
MAX_WRITE = 4096  # a pipe takes this many bytes atomically: lines of several processes stay whole
FIELDS = ("worker", "request", "tenant")  # added if the record has them
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogConsole(Console):
    """The log's stream. When its reader has gone, as in `baton up 2>&1 | head`, it acts like a terminal that hung up:
    serving stops in order, and later lines are dropped."""

    def on_broken_pipe(self) -> None:
        """Raises nothing: the caller may be in the middle of stopping."""
        if self.quiet:
            return
        self.quiet = True
        lead_nowhere(self.file)  # for output of the interpreter and of libraries
        signal.raise_signal(signal.SIGHUP)


class ResultConsole(Console):
    """stdout of a verb that keeps running. A closed pipe, as in `baton up | head -1`, or a full disk does not stop the
    verb."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Prints markup, one line for each of its lines, with or without a terminal."""
        try:
            self.print(text)
        except (OSError, ValueError):  # ValueError: characters that the encoding lacks
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        lead_nowhere(self.file)  # else the interpreter flushes again at exit, fails, and exits with 120


def lead_nowhere(file: IO[str]) -> None:
    """Drops all later output to this stream, also of libraries and of the interpreter's exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def terminal(log_format: LogFormat, *, access_log: bool = False) -> Console:
    """Directs the log to stderr, with a line per request if there is an `access_log`."""
    console = LogConsole(stderr=True, force_terminal=False if log_format is LogFormat.JSON else None)
    set_up_log(console, log_format, access_log=access_log)
    return console


def set_up_log(console: Console, log_format: LogFormat, *, access_log: bool = False) -> None:
    """Logs Baton's records from INFO on, others' from WARNING on, and a line per request with an `access_log`. A
    second call replaces the first."""
    handler: logging.Handler = JsonHandler(console) if log_format is LogFormat.JSON else TextHandler(console)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("baton").setLevel(logging.INFO)
    accesses = logging.getLogger(ACCESS)
    for before in tuple(accesses.handlers):
        accesses.removeHandler(before)
        before.close()
    accesses.propagate = False
    accesses.setLevel(logging.INFO if access_log else logging.CRITICAL)
    if access_log:
        accesses.addHandler(AccessHandler(console, log_format))


class TextHandler(logging.Handler):
    """22:08:06 worker decode-0 at 127.0.0.1:40123 is ready. Printed through the console, so that progress bars stay
    whole."""

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
    """Formats and writes in a thread of its own, many lines at a time: requests do not wait for the log, even if its
    reader stops reading. Lines that do not fit in the buffer are dropped and counted."""

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
        """Writes the buffered lines, unless the thread hangs in a write."""
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
            warning = f"{dropped} lines of the access log had no room: stderr is read too slowly"
            lines.append(self._format(logging.LogRecord(ACCESS, logging.WARNING, "", 0, warning, None, None)))
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
            pass  # the log itself failed: there is nowhere to report it


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Joins lines into writes of at most `MAX_WRITE` bytes, unless one line is longer."""
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
    entry: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    entry |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None)}
    if (fields := getattr(record.msg, "fields", None)) is not None:
        entry |= fields()
    if record.exc_info:
        entry["traceback"] = logging.Formatter().formatException(record.exc_info)
    return entry
