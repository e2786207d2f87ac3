"""Middleware for every HTTP request: its id, limits on head and body, its tenant."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.errors import (
    BatonError,
    Cancelled,
    Forbidden,
    HeadersTooLarge,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from protos.event_loop import loop_time
from router.auth.auth import AccessControl
from router.auth.tenants import Tenant
from router.http.access_log import CLIENT_LEFT, MAX_PATH, is_logged, log_access
from router.http.api import Api, api_of, error_response, find_api, internal_error
from router.http.protocol import channel_of
from router.request_metrics import Arrival, Track, arrival

log = logging.getLogger("baton.http")

REQUEST_ID = "x-baton-request-id"
BUDGET = "x-baton-budget"
_REQUEST_ID = REQUEST_ID.encode()
_POLLED = {"/ready", "/health", "/metrics"}
_NOT_READY = 503
_JSON = "application/json"
_FOR_ADMINS = "/v1/organization/"  # behind the door of /admin
NAMES_DRAWN = 64
_ACCEPTABLE = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)


def random_names() -> Iterator[str]:
    """Names of 32 hexadecimal digits, drawn for many at once: a call of the operating system costs more than reading
    a request."""
    while True:
        drawn = os.urandom(16 * NAMES_DRAWN).hex()
        yield from (drawn[at : at + 32] for at in range(0, len(drawn), 32))


def request_name(given: str, names: Iterator[str]) -> str:
    """The request's id: the client's if it is valid, else a new one."""
    return given if _ACCEPTABLE.fullmatch(given) else f"req-{next(names)}"


def find_header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name, in small letters; five times as fast as Starlette's."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value.decode("latin-1"))
    return None


def header_of(scope: Scope, name: bytes) -> str:
    """A header's value; "" if there is none."""
    return find_header(scope, name) or ""


async def received_body(request: Request) -> bytes:
    """The whole body: Starlette's reading costs as much as parsing it. Raises Cancelled if the client goes away."""
    parts = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away while sending its request")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def name_of(request: Request) -> str:
    """The id as sent in `x-baton-request-id`."""
    return str(request.scope["state"]["request_id"])


def tenant_of(request: Request) -> Tenant:
    """The tenant of the request's API key."""
    tenant = request.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def track_of(request: Request) -> Track:
    """The measures of a request that generates."""
    track = request.scope["state"]["track"]
    assert isinstance(track, Track)
    return track


class RequestId:
    """Answers carry the client's request id if it is a short plain word, or a new one, by which /admin/requests and the
    log name the request. The request's path or a header decides which of the `apis` it is for (`api_of`)."""

    def __init__(self, app: ASGIApp, *, apis: Sequence[Api] = ()) -> None:
        self._app = app
        self._apis = tuple(apis)
        self._names = random_names()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_name(header_of(scope, _REQUEST_ID) or header_of(scope, b"x-request-id"), self._names)
        state = scope.setdefault("state", {})
        api = state["api"] = find_api(self._apis, scope)
        state["request_id"] = name
        begun_s, status = loop_time(), 0
        arrival.set(Arrival(begun_s, header_of(scope, b"traceparent")))

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, name.encode())]
                if api.id_header:
                    message["headers"].append((api.id_header, name.encode()))
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:  # no inner layer has answered, and the client needs an answer
            log.exception("request %s failed: internal error", name, extra={"request": name})
            if status:
                raise
            await error_response(internal_error(), api)(scope, receive, named)
        finally:
            status = status or CLIENT_LEFT
            if is_logged() and not is_routine(scope, status):
                _log(scope, status, loop_time() - begun_s)


def is_routine(scope: Scope, status: int) -> bool:
    """Whether the log leaves it out: probes, scrapers and the open page send requests every few seconds."""
    path, method = scope["path"], scope["method"]
    if method != "GET" or (status >= 400 and (path, status) != ("/ready", _NOT_READY)):
        return False
    return path in _POLLED or path.startswith("/admin/")


def _log(scope: Scope, status: int, seconds: float) -> None:
    state, client = scope["state"], scope.get("client")
    tenant = state.get("tenant")
    log_access(
        scope["method"],
        scope["raw_path"].decode("latin-1")[:MAX_PATH],
        status,
        seconds,
        client=client[0] if client else "",
        request=state["request_id"],
        tenant=tenant.name if tenant is not None else "",
        track=state.get("track"),
    )


class Gate:
    """Answers requests that no handler may see, and gives those below `paths` their tenant (`tenant_of`).

    - A head of more than `max_head_bytes`: 431. The server has read it already; the application need not.
    - Pages of other sites, while there are no tenants: the address alone protects this gateway then, and browsers reach
      it for every page that they show. Such a page may send nothing, nor come by a name of its own that leads here (DNS
      rebinding), which has a dot in it. Requests under /admin have bodies of JSON, which a browser sends to another
      origin only if that allows it.
    - A key that is not known: 401.
    - A body of more than `max_bytes`: 413, immediately if its length is announced, else when it is exceeded. The server
      drops what the client sends after that. `uploads`: paths that take larger bodies, with the bytes of each.
    - A body that is incomplete `timeout_s` after its head, or an upload of which no piece came for so long: 408.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessControl,
        paths: tuple[str, ...],
        max_head_bytes: int,
        max_bytes: int,
        timeout_s: float,
        uploads: Mapping[str, int] | None = None,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._access = access
        self._paths = paths
        self._max_head_bytes = max_head_bytes
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._uploads = uploads or {}
        self._origins = frozenset(origins)
        own = socket.gethostname()
        self._names = {name.lower() for name in (own, f"{own}.local", *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_head(scope)
            if self._access.roster.is_open:
                self._check_origin(scope)
            if scope["path"].startswith(self._paths) and not scope["path"].startswith(_FOR_ADMINS):
                tenant = scope.setdefault("state", {})["tenant"] = self._access.identify(_authorization(scope))
                if notice := self._access.budgets.notice(tenant):
                    send = _with_header(send, BUDGET.encode(), notice.encode())
            receive = self._limited(scope, receive)
        except BatonError as refusal:
            await error_response(refusal, api_of(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"])
        if size > self._max_head_bytes:
            problem = f"The headers and the path have {size} bytes: at most {self._max_head_bytes} are read"
            raise HeadersTooLarge(problem)

    def _check_origin(self, scope: Scope) -> None:
        host, origin = header_of(scope, b"host").lower(), header_of(scope, b"origin")
        if host and not self._is_own(host):
            raise Forbidden(
                f"The header 'Host' is {host[:100]!r}, no address or name of this gateway: use one, or add the name to "
                "router.http.hosts"
            )
        is_foreign = origin and origin.lower().partition("://")[2] != host
        if is_foreign and not self._origins & {"*", origin}:
            raise Forbidden(
                f"The header 'Origin' is {origin[:100]!r}: pages of other origins may send nothing to a gateway "
                "without tenants; add it to router.http.cors_origins if this one may"
            )
        kind, has_body = header_of(scope, b"content-type"), header_of(scope, b"content-length") not in ("", "0")
        has_body = has_body or find_header(scope, b"transfer-encoding") is not None
        if scope["path"].startswith("/admin") and has_body and kind.partition(";")[0].strip().lower() != _JSON:
            raise UnsupportedMediaType(f"The body's 'Content-Type' is {kind[:100]!r}: send {_JSON}")

    def _is_own(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).strip("[]")
        if "." not in name or name in self._names or name.endswith(".localhost"):
            return True
        try:
            return bool(ip_address(name))
        except ValueError:
            return False

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Raises PayloadTooLarge; so does the new `receive`, and RequestTimeout."""
        announced = header_of(scope, b"content-length")
        is_upload = scope["path"] in self._uploads
        max_bytes = self._uploads[scope["path"]] if is_upload else self._max_bytes
        if announced.isdigit() and _is_more(announced, max_bytes):
            raise _too_large(f"of {announced.lstrip('0')[:32]} bytes", max_bytes)
        due_s = loop_time() + self._timeout_s
        seen, is_whole = 0, False
        channel = channel_of(scope)

        async def limited() -> Message:
            nonlocal seen, is_whole, due_s
            if is_whole:  # from here on only a disconnect is awaited
                return await receive()
            try:
                if channel is not None and channel.has_all:  # the usual case: nothing to wait for
                    message = await receive()
                else:
                    async with asyncio.timeout_at(due_s):
                        message = await receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"The body had no end within {self._timeout_s:g} s of its headers ({seen} bytes came): send it "
                    "faster"
                ) from None
            seen += len(message.get("body", b""))
            if is_upload:
                due_s = loop_time() + self._timeout_s
            is_whole = not message.get("more_body", False)
            if seen > max_bytes:
                raise _too_large("sent", max_bytes)
            return message

        return limited


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def added(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (name, value)]
        await send(message)

    return added


def _authorization(scope: Scope) -> str:
    """Reads the key from `Authorization`, or from the API's own header."""
    found, other = header_of(scope, b"authorization"), api_of(scope).key_header
    if found or not other:
        return found
    key = header_of(scope, other)
    return f"Bearer {key}" if key else ""


def _too_large(what: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body {what} is too large: at most {max_bytes} bytes are read")


def _is_more(digits: str, most: int) -> bool:
    """Compares as text: Python parses no number of more than 4,300 digits."""
    digits = digits.lstrip("0")
    return len(digits) > len(str(most)) or int(digits or "0") > most
