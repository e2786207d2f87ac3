"""Checks that a Ray listens at an address before Ray's library tries, which takes minutes in C++ and cannot be
interrupted."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

from protos.errors import Misconfigured

TIMEOUT_S = 5.0


async def check_answers(address: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises Misconfigured if no process listens at `address` (host:port, ray://host:port, or auto; RAY_ADDRESS
    overrides auto)."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not named or named == "auto":
        return  # Ray searches this machine, and fails immediately if there is none
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
    """The reason in words, without Python's error numbers and the addresses tried."""
    if error.errno is None or error.errno <= 0:  # an unknown host name, or several addresses
        return error.strerror or str(error)
    return os.strerror(error.errno)


def no_ray(address: str, reason: str) -> Misconfigured:
    return Misconfigured(f"there is no Ray at {address}: {reason}; correct --ray-address", param="ray.address")


def _endpoint(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        if parts.scheme == "ray" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:  # the port is not a number
        pass
    raise Misconfigured(
        f"ray.address is {address!r}: expected host:port, ray://host:port, or auto; correct --ray-address",
        param="ray.address",
    )
