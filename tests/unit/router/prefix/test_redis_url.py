"""URLs of Redis; no connection is made."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from protos.errors import Misconfigured
from router.prefix.redis_url import RedisUrl, close, parse


def parts(url: str) -> dict[str, Any]:
    read = parse(url, setting="index")
    told = {name: getattr(read, name) for name in RedisUrl.__dataclass_fields__}
    return {name: value for name, value in told.items() if value not in ("", None, 0, {}, (), False)}


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("redis://cache", {"hosts": (("cache", 6379),)}),
        ("redis://cache:6400/3", {"hosts": (("cache", 6400),), "db": 3}),
        ("redis://:s%40crt@[::1]", {"hosts": (("::1", 6379),), "password": "s@crt"}),
        ("rediss://user:pw@c", {"hosts": (("c", 6379),), "username": "user", "password": "pw", "tls": True}),
        (
            "rediss://c?ssl_ca_certs=/ca.pem",
            {"hosts": (("c", 6379),), "tls": True, "options": {"ssl_ca_certs": "/ca.pem"}},
        ),
        (
            "redis+sentinel://:pw@a,b:26380/main/2",
            {"kind": "sentinel", "hosts": (("a", 26379), ("b", 26380)), "service": "main", "db": 2, "password": "pw"},
        ),
        ("unix:///run/redis.sock", {"path": "/run/redis.sock"}),
        ("rediss+cluster://a:1,b:2", {"kind": "cluster", "hosts": (("a", 1), ("b", 2)), "tls": True}),
    ],
)
def test_a_url_is_read(url: str, means: dict[str, Any]) -> None:
    assert parts(url) == means


def test_the_urls_password_precedes_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_REDIS_PASSWORD", "from-a-secret")
    assert parse("redis://cache", setting="index").password == "from-a-secret"
    assert parse("redis://:own@cache", setting="index").password == "own"
    assert "from-a-secret" not in parse("redis://cache", setting="index").shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://cache", "'http' is not a Redis URL"),
        ("redis://", "a host is missing"),
        ("redis://cache:port", "'cache:port' is not a host and port"),
        ("redis://cache/main", "'main' is not the number of a database"),
        (f"redis://cache/{'1' * 4301}", "1' is not the number of a database"),
        ("redis://a,b", "2 hosts: one server has one"),
        ("redis+sentinel://a", "names its service"),
        ("redis+cluster://a/1", "no numbered databases"),
        ("redis://a?ssl_ca_certs=/ca.pem", "begin the URL with rediss"),
        ("redis://:p@secret#1@host", "%23 for #"),
        ("redis://:secret/1@host", "%2F for /"),
        ("redis://:secret?1@host", r"%3F for \?"),
        ("redis://:secret[1@host", "percent-encoded"),
        ("redis://:secret@a?colour=red", r"\?colour= is unknown"),
    ],
)
def test_an_unclear_url_is_refused_without_its_password(url: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said) as told:
        parse(url, setting="index")
    assert "secret" not in told.value.message
    assert told.value.param == "index"


async def test_a_url_makes_the_client_it_asks_for() -> None:
    plain = parse("rediss://u:pw@c:1/2?ssl_cert_reqs=none", setting="index").client(timeout_s=1.5)
    assert isinstance(plain, Redis)
    told = plain.connection_pool.connection_kwargs
    assert {name: told[name] for name in ("host", "port", "db", "username", "password", "socket_timeout")} == {
        "host": "c", "port": 1, "db": 2, "username": "u", "password": "pw", "socket_timeout": 1.5,
    }  # fmt: skip
    watched = parse("redis+sentinel://:pw@a,b/main?sentinel_password=watch", setting="index").client(timeout_s=1.0)
    assert isinstance(watched, Redis)
    pool = watched.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert (pool.service_name, pool.connection_kwargs["password"]) == ("main", "pw")
    sentinels = pool.sentinel_manager.sentinels
    assert [sentinel.connection_pool.connection_kwargs["host"] for sentinel in sentinels] == ["a", "b"]
    assert sentinels[0].connection_pool.connection_kwargs["password"] == "watch"
    spread = parse("redis+cluster://:pw@a,b", setting="index").client(timeout_s=1.0)
    assert isinstance(spread, RedisCluster)
    for client in (plain, watched, spread):
        await close(client)


def test_people_are_shown_everything_but_the_password() -> None:
    url = parse("rediss+sentinel://user:secret@a,b/main/2", setting="index")
    assert url.shown == "rediss+sentinel://a:26379,b:26379/main/2"
    assert "secret" not in repr(url)
