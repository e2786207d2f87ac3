"""Files of a checkpoint, opened and read with bounds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from protos.errors import BadCheckpoint
from protos.hints import lfs_pointer, unusable

MAX_BYTES = 2**27
"""Bytes of a file without weights."""


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file of a checkpoint. A stranger's device would never end, a FIFO never begin. Raises OSError, and
    BadCheckpoint for anything but a plain file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadCheckpoint(f"{path} is no plain file (a folder, device, FIFO or socket): put the file there")
    return os.fdopen(file, "rb")


def read_plain(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a plain file of at most `most` bytes. Raises OSError, and BadCheckpoint for other files."""
    with open_plain(path) as file:
        if len(content := file.read(most + 1)) > most:
            raise BadCheckpoint(f"{path} has more than {most:,} bytes, which no such file has: put the right one there")
    return content


def read_text(path: Path) -> str | None:
    """The text; None without the file. Raises BadCheckpoint."""
    try:
        return read_plain(path).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path}: {unusable(error)}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not UTF-8 ({error}): download it again") from error


def read_object(path: Path, most: int = MAX_BYTES) -> dict[str, Any] | None:
    """The JSON object in a file; None without the file. Raises BadCheckpoint when it is damaged."""
    try:
        data = json.loads(read_plain(path, most).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path}: {unusable(error)}") from error
    except (ValueError, RecursionError) as error:
        damage = f"{path} is not valid JSON ({error}): download it again"
        raise BadCheckpoint(lfs_pointer(path) or damage) from error
    if not isinstance(data, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object, it holds a {type(data).__name__}: download it again")
    return data
