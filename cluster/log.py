"""What Baton says while it runs, on stderr: lines for people, or JSON for machines. Never a prompt's text. What
somebody wants to use goes to stdout."""

from __future__ import annotations

import json
import logging
import os
import signal
from datetime import UTC, datetime
from enum import StrEnum
from typing import IO

from rich.console import Console
from rich.text import Text

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


def set_up_log(console: Console, log_format: LogFormat, *, level: int = logging.INFO) -> None:
    """Ours from `level` on, others' from WARNING on. A second call replaces the first."""
    handler: logging.Handler = JsonHandler(console) if log_format is LogFormat.JSON else TextHandler(console)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("baton").setLevel(level)


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
            self._console.file.write(json.dumps(_fields(record), ensure_ascii=False) + "\n")
            self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()
        except (OSError, ValueError):
            self.handleError(record)


def _fields(record: logging.LogRecord) -> dict[str, str]:
    told = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    if record.exc_info:
        told["traceback"] = logging.Formatter().formatException(record.exc_info)
    return told
