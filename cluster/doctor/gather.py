"""Gathers what `baton doctor` judges: from a gateway's admin API, this host, Redis, and the lanes themselves."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import httpx
from redis.exceptions import ResponseError

from cluster.cli.admin_client import error_of, lacks_key, open_client, silence
from cluster.doctor.examination import (
    ClosedPort,
    Examination,
    HostFacts,
    LaneProbe,
    LaneSpeed,
    RedisFacts,
    View,
)
from cluster.hub.download import latest_commit
from protos.errors import BatonError, Overloaded
from protos.listening import host_of
from router.dispatch.lane_probe import PROBE_TIMEOUT_S
from router.prefix.redis_url import TROUBLES, RedisUrl, close, parse

TOTAL_S = 14.0
"""For the whole examination."""
SIZES = (64, 512, 4096)  # tokens of a prompt, as far as the model's context allows
LEAST_ANSWER_S = 8.0
"""A gateway that has not answered a probe in less time says nothing about the lane."""
LEAST_PROBE_S = 1.0
"""With less left, no probe is begun."""
REPLY_S = 0.3
"""Seconds of the time that is left, for the gateway to say that a probe took too long."""
STATUS_S, REDIS_S, PORTS_S = 4.0, 3.0, 3.0
LEAST_LOOK_S = 6.0
"""With less left after the first model, others are not looked at."""
MAX_LOOKS = 32  # at a time
CONNECT_S = 1.0
NAMES_S = 1.0
"""For names to be resolved: a resolver may be silent for half a minute, and nothing interrupts it."""
MAX_CONNECTS = 512  # at a time
DATE_S = 2.0
"""Age that a Date header may have: whole seconds, written once a second."""
NUM_PINGS = 5
PINGS_S = 0.5
"""For two pings and more: a Redis that is far away needs the time for its other answers."""
_EXPIRY = re.compile(r'^baton_certificate_expiry_timestamp_seconds\{use="(\w+)"\} (\S+)$', re.MULTILINE)


def examine(url: str, api_key: str = "", redis_url: str = "", *, probes: bool = True) -> Sequence[Examination]:
    """Examines each model at the address, that of `url` first. Takes less than 15 seconds for all of them. Raises
    Misconfigured for an invalid URL."""
    ends_s = time.monotonic() + TOTAL_S
    host, redis = _host(), _redis_facts(redis_url) if redis_url else None
    first = replace(_look(url, api_key, ends_s), host=host, redis=redis)
    others = [f"{url.rstrip('/')}/models/{name}" for name in first.status.get("models", ())[1:]]
    if ends_s - time.monotonic() < LEAST_LOOK_S:
        first, others = replace(first, unseen=len(others)), []
    with ThreadPoolExecutor(MAX_LOOKS) as pool:
        seen = [first, *pool.map(lambda other: _look(other, api_key, ends_s, is_first=False), others)]
    if not probes:
        return seen
    return [_probed(one, api_key, ends_s, len(seen) - number) for number, one in enumerate(seen)]


def _look(url: str, api_key: str, ends_s: float, *, is_first: bool = True) -> Examination:
    """Examines everything but lanes, host and Redis. The first model's result has the gateway's clock, certificates
    and troubles."""
    status_s = min(STATUS_S, max(0.1, ends_s - time.monotonic() - NAMES_S - PORTS_S))
    facts: dict[str, Any] = {"url": url, "now_s": time.time()}
    with open_client(url, api_key) as client:
        if unknown := _unresolved([client.base_url.host]):
            return Examination(**facts, no_answer=f"the name {unknown[0]} is not resolved in {NAMES_S:g} s")
        try:
            asked_s = time.time()
            answer = client.get("/admin/status", timeout=status_s)
            ahead_s = _ahead_s(answer, asked_s, time.time()) if is_first else None
        except httpx.HTTPError as error:
            name = "Hostname mismatch" in str(error) or "IP address mismatch" in str(error)
            why, fix = silence(client, error)
            return Examination(**facts, no_answer=why, fix=fix, tls_error=str(error) if name else "")
        if answer.is_error:
            problem = error_of(answer.text, answer.status_code).message
            return Examination(**facts, no_answer=problem, lacks_key=lacks_key(answer))
        status = _json_of(answer)
        metrics = _metrics(client, status) if is_first else ""
    if "workers" not in status:
        return Examination(**facts, no_answer=f"{url} answers, and not as a gateway: /admin/status is no report")
    if not is_first:
        status["troubles"] = []
    ends = {use: float(at) for use, at in _EXPIRY.findall(metrics)}
    closed, untried = _closed(status)
    seen = Examination(
        **facts, clock_ahead_s=ahead_s, status=status, certificates=ends, closed=closed, untried=untried
    )  # fmt: skip
    return replace(seen, hub_commits={one.repository: latest_commit(one.repository) for one in seen.hub_names})


def _metrics(client: httpx.Client, status: Mapping[str, Any]) -> str:
    """Returns /metrics of the first gateway process; "" without an answer."""
    ports = status.get("processes")
    with contextlib.suppress(httpx.HTTPError):
        url = client.base_url.copy_with(port=ports[0]).join("/metrics") if ports else "/metrics"
        return client.get(url, timeout=STATUS_S).text
    return ""


def _probed(seen: Examination, api_key: str, ends_s: float, num_left: int) -> Examination:
    """Adds the lanes, in this model's share of the time that is left."""
    if not seen.status:
        return seen
    now_s = time.monotonic()
    with open_client(seen.url, api_key) as client:
        found, unprobed = _probes(client, seen.status, now_s + max(0.0, ends_s - now_s) / num_left)
    return replace(seen, probes=found, unprobed=unprobed)


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    """The object of an answer; empty if the answer is no JSON object, as from a proxy or another server."""
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _ahead_s(answer: httpx.Response, asked_s: float, came_s: float) -> float | None:
    """The least number of seconds by which the gateway's clock is ahead of this host's; 0 if both may agree. The Date
    header is at most `DATE_S` before a moment between request and answer. None without the header."""
    try:
        sent_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    least_s, most_s = sent_s - came_s, sent_s + DATE_S - asked_s
    return max(least_s, min(most_s, 0.0))


def _host() -> HostFacts:
    try:
        shm = os.statvfs("/dev/shm")
        sizes = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        sizes = 0, 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = {"127.0.0.1", "localhost", "[::1]", socket.gethostname()}
    names |= _resolve([socket.gethostname()]).get(socket.gethostname(), set())
    return HostFacts(
        num_cores=len(os.sched_getaffinity(0)), shm_bytes=sizes[0], shm_free_bytes=sizes[1],
        max_open_files=2**31 if hard == resource.RLIM_INFINITY else hard, addresses=frozenset(names),
    )  # fmt: skip


def _resolve(hosts: Iterable[str]) -> dict[str, set[str]]:
    """The addresses of names that are found within `NAMES_S`; none for an unknown name. Nothing waits for its
    threads."""
    found: dict[str, set[str]] = {}

    def look(host: str) -> None:
        addresses: set[str] = set()
        with contextlib.suppress(OSError):
            addresses = {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
        found[host] = addresses

    until_s = time.monotonic() + NAMES_S
    threads = [threading.Thread(target=look, args=(host,), daemon=True) for host in set(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return dict(found)


def _unresolved(hosts: Iterable[str]) -> list[str]:
    """The names for which the resolver has no answer yet. A name that does not exist fails at the connection."""
    names = {host for host in hosts if not _is_address(host)}
    return sorted(names - _resolve(names).keys())


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _redis_facts(url: str) -> RedisFacts:
    where = parse(url, setting="--redis")
    if unknown := _unresolved(host for host, _ in where.hosts):
        return RedisFacts(url=where.shown, error=f"the name {unknown[0]} is not resolved in {NAMES_S:g} s")
    return asyncio.run(_redis(where))


async def _redis(where: RedisUrl) -> RedisFacts:
    client: Any = where.client(timeout_s=CONNECT_S)
    try:
        async with asyncio.timeout(REDIS_S):
            trips = []
            for _ in range(NUM_PINGS):
                began = time.monotonic()
                await client.ping()
                trips.append(time.monotonic() - began)
                if len(trips) > 1 and sum(trips) > PINGS_S:
                    break
            info = await client.info("server")
            policy = await _policy(client)
    except TimeoutError:
        return RedisFacts(url=where.shown, error=f"it has not answered in {REDIS_S:g} s")
    except TROUBLES as error:
        return RedisFacts(url=where.shown, error=str(error) or repr(error))
    finally:
        await close(client)
    return RedisFacts(
        url=where.shown, version=str(info["redis_version"]), eviction=policy, round_trip_s=min(trips),
    )  # fmt: skip


async def _policy(client: Any) -> str:
    """Returns Redis' eviction policy; "" if a managed Redis refuses CONFIG."""
    try:
        return str((await client.config_get("maxmemory-policy")).get("maxmemory-policy", ""))
    except ResponseError:
        return ""


def _closed(status: View) -> tuple[Sequence[ClosedPort], int]:
    """Returns the closed ports among `_ports`, and the number of ports that were not tried for want of time."""
    ports = list(_ports(status))
    unknown = set(_unresolved(host_of(address) for _, address in ports))
    nameless = [
        ClosedPort(what=what, address=address, error=f"its name is not resolved in {NAMES_S:g} s")
        for what, address in ports
        if host_of(address) in unknown
    ]
    found, untried = asyncio.run(_try([port for port in ports if host_of(port[1]) not in unknown]))
    return (*nameless, *found), untried


async def _try(ports: Sequence[tuple[str, str]]) -> tuple[Sequence[ClosedPort], int]:
    """Returns the closed ports, and the number of ports not tried within `PORTS_S`. `MAX_CONNECTS` are tried at once,
    because a port that drops packets takes `CONNECT_S`."""
    room = asyncio.Semaphore(MAX_CONNECTS)

    async def tried(what: str, address: str) -> ClosedPort | None:
        async with room:
            error = await _connect_error(address)
        return ClosedPort(what=what, address=address, error=error) if error else None

    tasks = [asyncio.create_task(tried(*port)) for port in ports]
    if not tasks:
        return (), 0
    done, late = await asyncio.wait(tasks, timeout=PORTS_S)
    for task in late:
        task.cancel()
    return tuple(found for task in tasks if task in done and (found := task.result()) is not None), len(late)


async def _connect_error(address: str) -> str:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host_of(address), int(address.rpartition(":")[2]))
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


def _ports(status: View) -> Iterator[tuple[str, str]]:
    """Names and addresses of the ports of ready workers: gRPC service, and rendezvous of lanes. Another host's loopback
    addresses cannot be told from this host's."""
    for worker in status["workers"]:
        if worker["state"] != "ready" or worker["info"] is None:
            continue
        lane, name = worker["info"]["lane"], worker["worker_id"]
        yield name, worker["address"]
        yield f"lanes of {name}", f"{lane['host']}:{lane['port']}"


def _probes(client: httpx.Client, status: View, ends_s: float) -> tuple[Sequence[LaneProbe], int]:
    """Probes every pair that moves KV, as far as the time allows: prefill to decode, or all pairs of one pool."""
    ready = [one for one in status["workers"] if one["state"] == "ready" and one["info"] is not None]
    sources = [one for one in ready if one["info"]["role"] == "prefill"] or ready
    others = [one for one in ready if one["info"]["role"] != "prefill"]
    pairs = [(a, b) for a in sources for b in others if a is not b]
    found = [probe for pair in pairs if (probe := _probe(client, *pair, ends_s)) is not None]
    return tuple(found), len(pairs) - len(found)


def _probe(client: httpx.Client, source: View, destination: View, ends_s: float) -> LaneProbe | None:
    """Probes a lane. The first size is moved twice, since the first time may open the lane and compile. Sizes that the
    source does not compute in time are left out; None if all are."""
    ends = {"source": source["worker_id"], "destination": destination["worker_id"]}
    longest = min(source["info"]["max_model_len"], destination["info"]["max_model_len"]) - 2
    longest = min(longest, (source["load"]["num_free_blocks"] - 2) * source["info"]["layout"]["block_size"])
    sizes = sorted({max(1, min(size, longest)) for size in SIZES})
    speeds: dict[int, LaneSpeed] = {}
    transport = ""
    for size in (sizes[0], *sizes):
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_PROBE_S:
            break
        timeout_s = min(PROBE_TIMEOUT_S, left_s - REPLY_S)
        query = f"source={quote(ends['source'])}&destination={quote(ends['destination'])}&num_tokens={size}"
        try:
            answer = client.post(f"/admin/lanes/probe?{query}&timeout_s={timeout_s:.3f}", timeout=left_s)
            if answer.is_error:
                raise error_of(answer.text, answer.status_code)
        except Overloaded:
            break
        except (httpx.HTTPError, BatonError) as error:
            if isinstance(error, httpx.TimeoutException) and timeout_s < LEAST_ANSWER_S:
                break
            return LaneProbe(**ends, error=str(error) or repr(error), speeds=tuple(speeds.values()))
        reading = _json_of(answer)
        if not reading:
            return LaneProbe(**ends, error="the gateway's answer is not JSON", speeds=tuple(speeds.values()))
        transport = reading.pop("transport")
        speeds[size] = LaneSpeed(**reading)
    return LaneProbe(**ends, transport=transport, speeds=tuple(speeds.values())) if speeds else None
