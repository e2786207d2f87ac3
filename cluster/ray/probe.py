"""Is anybody there? Asked before Ray is, which tries for minutes, in C++, and cannot be interrupted."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

from protos.errors import Misconfigured

TIMEOUT_S = 5.0


async def check_answers(address: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises Misconfigured when nobody listens at `address` (host:port, ray://host:port, or auto, which RAY_ADDRESS may
    say more of)."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not named or named == "auto":
        return  # Ray looks for one on this machine, and says at once that there is none
    host, port = _endpoint(named)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise no_ray(named, f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise no_ray(named, reason_of(error)) from error
    writer.close()


def reason_of(error: OSError) -> str:
    """In words alone: neither Python's numbers nor the addresses that were tried."""
    if error.errno is None or error.errno <= 0:  # a name that is not known, or several addresses
        return error.strerror or str(error)
    return os.strerror(error.errno)


def no_ray(address: str, reason: str) -> Misconfigured:
    return Misconfigured(f"there is no Ray at {address}: {reason}; correct --ray-address", param="ray.address")


def _endpoint(address: str) -> tuple[str, int]:
    """Raises Misconfigured."""
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        if parts.scheme == "ray" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:  # the port is no number
        pass
    raise Misconfigured(
        f"ray.address is {address!r}: expected host:port, ray://host:port, or auto; correct --ray-address",
        param="ray.address",
    )
