"""Parses the URL of a Redis: one server, servers with Sentinels, or a cluster; plain or with TLS.

    redis://[[user]:password@]host[:6379][/db]                       rediss://... is the same under TLS
    redis+sentinel://[[user]:password@]host[:26379],host.../service[/db]    the service's name with the Sentinels
    redis+cluster://[[user]:password@]host[:6379],host...            any nodes of the cluster
    unix:///path/to/socket                                           a server on this machine

The query may contain connection options of redis-py: `?ssl_ca_certs=/etc/redis/ca.pem`. The password is for the
servers; one for the Sentinels themselves is `sentinel_password` in the query. A URL without a password takes the one in
the environment variable BATON_REDIS_PASSWORD, so that settings need not hold it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from protos.errors import Misconfigured
from protos.listening import netloc

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD"
TROUBLES = (RedisError, OSError, TimeoutError)
"""The exceptions of a command when Redis cannot be reached or used."""
_PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}
_FORM = "write it as redis://host:port, redis+sentinel://host:port,host:port/service or redis+cluster://host:port"
_ENCODED = "a password is percent-encoded: %23 for #, %2F for /, %3F for ?, %40 for @"
_OPTIONS = (
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "sentinel_username", "sentinel_password",
)  # fmt: skip


MAX_DIGITS = 9
"""The limit for the number of a database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """`kind` is "", "sentinel" or "cluster". `path`: of a Unix socket. `shown` is the URL without its
    password, for messages."""

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    service: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        scheme = f"redis{'s' * self.tls}{'+' * bool(self.kind)}{self.kind}"
        path = f"/{self.service}" * bool(self.service) + f"/{self.db}" * bool(self.db)
        return f"{scheme}://{','.join(starmap(netloc, self.hosts))}{path}"

    def client(self, *, timeout_s: float) -> Redis | RedisCluster:
        options: dict[str, Any] = {
            name: value for name, value in self.options.items() if not name.startswith("sentinel_")
        } | {"username": self.username, "password": self.password, "socket_timeout": timeout_s}
        options |= {
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
        }  # the caller has an event loop of its own
        if self.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in self.hosts]
            return RedisCluster(startup_nodes=nodes, ssl=self.tls, **options)
        if self.kind == "sentinel":
            watch = {
                name.removeprefix("sentinel_"): value
                for name, value in self.options.items()
                if name.startswith("sentinel_")
            } | {name: value for name, value in options.items() if name.startswith(("ssl", "socket"))}
            make: Any = Sentinel  # redis-py has no types here
            sentinel = make(self.hosts, sentinel_kwargs={"ssl": self.tls, **watch}, ssl=self.tls, **options)
            client: Redis = sentinel.master_for(self.service, db=self.db)
            return client
        if self.path:
            return Redis(unix_socket_path=self.path, **options)
        [(host, port)] = self.hosts
        return Redis(host=host, port=port, db=self.db, ssl=self.tls, **options)


def raise_if_cancelled() -> None:
    """redis-py (8.1) loses a cancellation that arrives in the middle of a command, so loops check for it themselves."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def close(client: Redis | RedisCluster) -> None:
    """Closes the client, and the connections to Sentinels, which redis-py leaves open."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def parse(url: str, *, setting: str) -> RedisUrl:
    try:
        parts = urlsplit(url)
    except ValueError as error:  # an IPv6 address without an end, or such a password
        raise Misconfigured(f"{setting} is not a URL: {error}; {_ENCODED}", param=setting) from error
    if parts.fragment or "@" in parts.path + parts.query:
        raise Misconfigured(f"{setting} has a '#', '/' or '?' before the end of its host; {_ENCODED}", param=setting)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        password = os.environ.get(PASSWORD_VARIABLE) or None
        return RedisUrl(kind="", tls=False, hosts=(), path=unquote(parts.path), password=password)
    if parts.scheme not in SCHEMES:
        raise Misconfigured(f"{setting}: {parts.scheme or url!r} is not a Redis URL: {_FORM}", param=setting)
    secure, _, kind = parts.scheme.partition("+")
    credentials, at, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = path.pop(0) if kind == "sentinel" and path else ""
    if kind == "sentinel" and not service:
        raise Misconfigured(
            f"{setting}: a Sentinel URL names its service: redis+sentinel://host/service", param=setting
        )
    if kind == "cluster" and path:
        raise Misconfigured(
            f"{setting}: a Redis Cluster has no numbered databases: leave /{path[0]} out", param=setting
        )
    if len(path) > 1 or (path and not (path[0].isdecimal() and len(path[0]) <= MAX_DIGITS)):
        raise Misconfigured(
            f"{setting}: {'/'.join(path)[:60]!r} is not the number of a database: {_FORM}", param=setting
        )
    return RedisUrl(
        kind=kind,
        tls=secure == "rediss",
        hosts=_hosts(hosts, kind, setting),
        username=unquote(username) or None if at else None,
        password=(unquote(password) if at else "") or os.environ.get(PASSWORD_VARIABLE) or None,
        db=int(path[0]) if path else 0,
        service=service,
        options=_options(parts.query, secure == "rediss", setting),
    )


def _hosts(addresses: str, kind: str, setting: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for address in addresses.split(","):
        parts = urlsplit(f"//{address}")
        try:
            host, port = parts.hostname, parts.port or _PORTS[kind]
        except ValueError as error:
            raise Misconfigured(f"{setting}: {address!r} is not a host and port: {error}", param=setting) from error
        if not host:
            raise Misconfigured(f"{setting}: a host is missing: {_FORM}", param=setting)
        hosts.append((host, port))
    if len(hosts) > 1 and not kind:
        raise Misconfigured(
            f"{setting}: {len(hosts)} hosts: one server has one host; for several, write redis+sentinel:// or redis+cluster://",
            param=setting,
        )
    return tuple(hosts)


def _options(query: str, tls: bool, setting: str) -> dict[str, str]:
    options = dict(parse_qsl(query))
    for name in options:
        if name not in _OPTIONS:
            raise Misconfigured(f"{setting}: ?{name}= is unknown: use {', '.join(_OPTIONS)}", param=setting)
        if name.startswith("ssl") and not tls:
            raise Misconfigured(f"{setting}: ?{name}= is for TLS: begin the URL with rediss", param=setting)
    return options
