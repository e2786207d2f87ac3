"""Listens on ports before anything expensive is started. An error names the port that is taken and the flag to
change."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
from pathlib import Path

from protos.errors import Misconfigured
from protos.listening import bound, netloc

BACKLOG = 2048
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises Misconfigured, naming the flag to change."""
    try:
        listening = bound(host, port)
        listening.listen(BACKLOG)
    except socket.gaierror as error:
        raise Misconfigured(
            f"--host {host} is not an address of this machine: {error.strerror}", param="host"
        ) from error
    except OSError as error:
        raise _unusable(host, port, "--port", error) from error
    return listening


def listen_for_gateway(host: str, port: int, grpc_port: int) -> socket.socket:
    """A listening socket for HTTP, once the port of gRPC is known to be free. Raises Misconfigured; one error names
    both ports."""
    taken: list[Misconfigured] = []
    listening: socket.socket | None = None
    try:
        listening = listen(host, port)
    except Misconfigured as error:
        if error.param == "host":
            raise
        taken.append(error)
    try:
        check_free(host, grpc_port, "--grpc-port")
    except Misconfigured as error:
        taken.append(error)
    if listening is not None and not taken:
        return listening
    if listening is not None:
        listening.close()
    raise Misconfigured("; ".join(error.message for error in taken), param=taken[0].param)


def check_free(host: str, port: int, flag: str) -> None:
    """Raises Misconfigured if the port is taken; another process may still take it before it is bound."""
    if port:
        try:
            with bound(host, port) as free:
                free.listen()
        except OSError as error:
            raise _unusable(host, port, flag, error) from error


def reserve(host: str, port: int, flag: str) -> socket.socket:
    """Reserves a port, 0 being any free one, for processes that share it (SO_REUSEPORT), without listening. Raises
    Misconfigured if it is taken."""
    check_free(host, port, flag)
    try:
        return bound(host, port, option=socket.SO_REUSEPORT)
    except OSError as error:
        raise _unusable(host, port, flag, error) from error


def url_of(listening: socket.socket, *, is_secure: bool) -> str:
    """The URL for a client on this machine."""
    host, port = listening.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if is_secure else 'http'}://{netloc(reachable, port)}"


def example(url: str, model: str, *, has_chat: bool, asks_for_keys: bool = False) -> str:
    """A request to try, as a curl command, with placeholders for the API key and the certificate."""
    path, content = "completions", '"prompt": "Once upon a time", "max_tokens": 32'
    if has_chat:
        path = "chat/completions"
        content = '"messages": [{"role": "user", "content": "What does os.path.join do?"}]'
    body = f'{{"model": {json.dumps(model)}, {content}}}'
    signed = " --cacert CA.pem" if url.startswith("https:") else ""
    key = " -H 'authorization: Bearer YOUR_KEY'" if asks_for_keys else ""
    where = shlex.quote(f"{url}/v1/{path}")
    return f"curl{signed} {where}{key} -H 'content-type: application/json' -d {shlex.quote(body)}"


def _unusable(host: str, port: int, flag: str, error: OSError) -> Misconfigured:
    if error.errno == errno.EADDRINUSE:
        who = f" by {found}" if (found := listener(port)) else ""
        return Misconfigured(
            f"port {port} of {host} is taken{who}: stop the program that listens there, or choose another: {flag} N "
            f"({flag} 0: any free one)",
            param=flag.removeprefix("--"),
        )
    if error.errno == errno.EACCES:
        return Misconfigured(f"port {port} is reserved for root: choose one above 1023 with {flag}", param=flag[2:])
    why = str(error.strerror).partition(" (while")[0]  # asyncio and socket repeat the address
    return Misconfigured(f"cannot listen on {netloc(host, port)}: {why}; see --host and {flag}", param="host")


def listener(port: int, proc: Path = Path("/proc")) -> str:
    """The process that listens on a port of this machine, as "name (process 123)"; "" if unknown: another user's, in
    another container, or without /proc."""
    inodes = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, port)}
    if not inodes:
        return ""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(os.readlink(one) in inodes for one in (folder / "fd").iterdir()):
                return f"{(folder / 'comm').read_text().strip()} (process {folder.name})"
        except OSError:
            continue  # another user's process, or one that has ended
    return ""


def _listening(table: Path, port: int) -> list[str]:
    """Inodes of the sockets that listen there, from a table of the kernel (proc(5), /proc/net/tcp)."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port]
