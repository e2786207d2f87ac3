"""The other gateway processes behind the same port: their sockets, and their answers to requests about all processes.

    client ── GET /admin/requests/r ──▶ process 1: not mine ══ Unix sockets ══▶ processes 0 and 2: mine ──▶ one answer

A request that came from another process is answered for this process alone, and not forwarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("baton.router")

TIMEOUT_S = 2.0
_PASSED_ON = ("authorization", "accept")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """A gateway process as its supervisor sees it. `reason` is why it is not ready; `pid` is 0 while it waits to be
    restarted."""

    number: int
    pid: int
    state: str
    reason: str = ""


class PeerProcesses:
    """Process `number` of `count`. Each process has its socket in `folder`; without a folder there is one process.

    `settled`: all processes have been ready once. Until then none reports that it is ready.
    """

    def __init__(self, *, folder: Path | None = None, number: int = 0, count: int = 1) -> None:
        self.number = number
        self.count = count
        self.folder = folder
        self.statuses: Sequence[ProcessStatus] = ()
        self.settled = count == 1
        others = [other for other in range(count) if other != number] if folder is not None else []
        self._clients = {other: _client(http_socket(folder, other)) for other in others if folder is not None}

    @property
    def alone(self) -> bool:
        return not self._clients

    @property
    def trouble(self) -> str:
        """The processes that are not ready, with their reasons; "" when all are ready."""
        away = [one for one in self.statuses if one.state != "ready"]
        return "; ".join(
            f"gateway process {one.number} is {one.state}{f' ({one.reason})' if one.reason else ''}" for one in away
        )

    async def ask(self, request: Request) -> Mapping[int, Any]:
        """Sends the same GET to every other process. Returns the JSON answers by process number, without processes
        that answer 404 or not in time. Empty for a request that came from another process."""
        if self.alone or from_other_process(request):
            return {}
        query: bytes = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        replies = await asyncio.gather(*(self._ask(number, target, headers) for number in self._clients))
        return {number: reply for number, reply in zip(self._clients, replies, strict=True) if reply is not None}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, number: int, target: bytes, headers: Mapping[str, str]) -> Any:
        """`target` is sent as the client wrote it: httpx refuses some of what a path may have, and shortens dots."""
        try:
            response = await self._clients[number].get("/", headers=headers, extensions={"target": target})
        except httpx.HTTPError as error:
            log.warning("gateway process %d does not answer %r: %r", number, target.partition(b"?")[0], error)
            return None
        return response.json() if response.status_code == 200 else None


class SingleProcessApp:
    """The application as other processes call it: it answers for this process alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["other_process"] = True
        await self._app(scope, receive, send)


def from_other_process(request: Request) -> bool:
    return bool(getattr(request.state, "other_process", False))


def http_socket(folder: Path, number: int) -> str:
    return str(folder / f"{number}.http")


def load_socket(folder: Path, number: int) -> str:
    return str(folder / f"{number}.load")


def expectations_socket(folder: Path, number: int) -> str:
    return str(folder / f"{number}.expectations")


def _client(path: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=path)
    return httpx.AsyncClient(transport=transport, base_url="http://process", timeout=TIMEOUT_S, trust_env=False)
