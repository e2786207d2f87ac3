"""Ports: taken before anything expensive is started, and named, with their flag, when somebody else has them."""

from __future__ import annotations

import errno
import socket

from protos.errors import Misconfigured

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises Misconfigured, naming the flag to change."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise Misconfigured(f"--host {host} is no address of this machine: {error.strerror}", param="host") from error
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise _unusable(host, port, "--port", error) from error


def check_free(host: str, port: int, flag: str) -> None:
    """Raises Misconfigured when somebody listens there; who binds it later may still lose a race."""
    if port:
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                pass
        except OSError as error:
            raise _unusable(host, port, flag, error) from error


def _unusable(host: str, port: int, flag: str, error: OSError) -> Misconfigured:
    if error.errno == errno.EADDRINUSE:
        return Misconfigured(
            f"port {port} of {host} is taken: stop the program that listens there, or choose another with {flag}",
            param=flag.removeprefix("--"),
        )
    if error.errno == errno.EACCES:
        return Misconfigured(f"port {port} is reserved for root: choose one above 1023 with {flag}", param=flag[2:])
    return Misconfigured(f"cannot listen on {host}:{port}: {error.strerror}; see --host and {flag}", param="host")
