"""How events are written: server-sent events without and with names, and lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def named_event(content: Mapping[str, Any]) -> bytes:
    """The event has the name of its `type`."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))


def json_line(content: Any) -> bytes:
    return orjson.dumps(content) + b"\n"
