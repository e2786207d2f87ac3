"""The transports by name. Looked up lazily: naming one loads nothing, making one loads what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from protos.errors import Misconfigured

_TRANSPORTS = {
    "inproc": "kvtransfer.transports.inproc:Exchange",
    "collective": "kvtransfer.transports.collective.collective:CollectiveTransport",
}


def transport(name: str) -> Callable[..., Any]:
    """What makes a transport's ends: an object with `sender(...)` and `receiver(...)`. Raises Misconfigured."""
    if name not in _TRANSPORTS:
        raise Misconfigured(f"transport is {name!r}: choose one of {', '.join(_TRANSPORTS)}", param="transport")
    module, _, attribute = _TRANSPORTS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
