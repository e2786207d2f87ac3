"""The transports by name. Looked up lazily: naming one loads nothing, making one loads what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from kvtransfer.transport import Transport
from protos.errors import Misconfigured

_COLLECTIVE = "kvtransfer.transports.collective.collective:CollectiveTransport"
_TRANSPORTS = {
    "inproc": "kvtransfer.transports.inproc:InprocExchange",
    "auto": _COLLECTIVE,
    "shm": _COLLECTIVE,
    "collective": _COLLECTIVE,
}
"""The values of `lanes.transport`, and those that only tests and simulators use."""

NAMES = tuple(_TRANSPORTS)


def transport(name: str) -> Callable[..., Transport]:
    """Makes a transport of this name. Raises Misconfigured."""
    if name not in _TRANSPORTS:
        raise Misconfigured(f"transport is {name!r}: choose one of {', '.join(_TRANSPORTS)}", param="transport")
    found: Callable[..., Transport] = resolve_name(_TRANSPORTS[name])
    return found
