"""The rules of `baton doctor`: each finds one kind of trouble in an examination, and names its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cluster.doctor.examination import Examination, Finding, LaneProbe, Severity
from protos.listening import host_of

CLOCK_S = 2.0
EXPIRES_S = 14 * 86_400.0
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 256 * 2**20
MIN_SHM_FREE = 0.1
SLOW_BYTES_PER_S = 50e6
SLOW_BYTES = 64e6  # fewer bytes say nothing about a lane's speed
REDIS_ROUND_TRIP_S = 0.02
REDIS_VERSION = (6, 2)
WORSE = 2.0
WORSE_S = 0.25

BROKEN = ("stuck", "quarantined")

Rule = Callable[[Examination], Iterator[Finding]]


def findings(*examinations: Examination) -> Sequence[Finding]:
    """Returns findings, faults first. Of several models all but the first are named; the first also has the findings of
    host and Redis."""
    found = [one for rule in RULES for one in rule(examinations[0])]
    for seen in examinations[1:]:
        model = seen.url.partition("/models/")[2]
        found += [replace(one, subject=f"{model}: {one.subject}") for rule in RULES for one in rule(seen)]
    return sorted(found, key=lambda one: one.severity is not Severity.FAULT)


def _fault(name: str, subject: str, text: str, fix: str) -> Finding:
    return Finding(name=name, severity=Severity.FAULT, subject=subject, text=text, fix=fix)


def _warning(name: str, subject: str, text: str, fix: str) -> Finding:
    return Finding(name=name, severity=Severity.WARNING, subject=subject, text=text, fix=fix)


def _gateway(seen: Examination) -> Iterator[Finding]:
    if seen.tls_error:
        yield _fault("tls-name", seen.url, seen.tls_error, "issue a certificate for the host in --url, or use its name")
    if seen.no_answer:
        if seen.lacks_key:
            key = "give --api-key, or the environment variable BATON_ADMIN_KEY"
            yield _fault("no-admin-key", seen.url, seen.no_answer, key)
        else:
            fix = seen.fix or "start it, or name another with --url"
            yield _fault("gateway-unreachable", seen.url, seen.no_answer, fix)
    elif seen.status and not seen.status["ready"]:
        yield _fault("not-ready", seen.url, seen.status["reason"], "mend the workers below; `baton status` shows them")


def _troubles(seen: Examination) -> Iterator[Finding]:
    for text in seen.status.get("troubles", ()):
        yield _warning("gateway-degraded", seen.url, text, "mend it: the gateway tries again by itself")


def _certificates(seen: Examination) -> Iterator[Finding]:
    for use, ends_s in seen.certificates.items():
        left_s = ends_s - seen.now_s
        if left_s < EXPIRES_S:
            text = f"it ends in {left_s / 86_400:.0f} days" if left_s > 0 else "it has ended"
            make = _warning if left_s > 0 else _fault
            yield make("tls-expiry", f"certificate for {use}", text, "renew it, and restart its process")


def _clock(seen: Examination) -> Iterator[Finding]:
    ahead_s = seen.clock_ahead_s
    if ahead_s is not None and abs(ahead_s) > CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        text = f"its clock is {abs(ahead_s):.0f} s {side} this host's"
        yield _warning("clock-skew", seen.url, text, "run an NTP client (chrony) on every host")


def _workers(seen: Examination) -> Iterator[Finding]:
    for worker in seen.workers:
        if worker["state"] not in ("ready", "draining", "drained", "joining"):  # a drained one is lost after a while
            text = f"it is {worker['state']}: {worker['reason']}"
            incompatible = worker["state"] == "incompatible"
            fix = "start it as the others" if incompatible else "it is started again; if it stays away, see its log"
            yield _fault("worker-away", worker["worker_id"], text, fix)
    for name, text in (("model", "model"), ("vocab_size", "vocabulary's size"), ("weights", "encoding of weights")):
        revisions: dict[str, dict[str, str]] = {}  # during a roll there are two, and each has one model
        for worker in seen.workers:
            if (info := worker["info"]) is not None:
                values = revisions.setdefault(info.get("revision", ""), {})
                values.setdefault(str(info.get(name, "")), worker["worker_id"])
        for values in revisions.values():
            if len(values) > 1:
                shown = ", ".join(f"{worker} has {value or 'none'}" for value, worker in values.items())
                found = f"the {text} is not the same: {shown}"
                yield _fault("model-differs", "workers", found, "start all from one model")


_DIGESTS = (
    ("model-differs", "weights", _fault, "give every host the same files, and restart"),
    ("tokenizer-differs", "tokenizer", _fault, "give every host the same files, and restart"),
    ("template-differs", "template", _warning, "give every host the same files: gateways render with their own"),
)


def _digests(seen: Examination) -> Iterator[Finding]:
    """Compares the digests of the model's files at the gateway and at each worker of a revision. "" is unknown."""
    of_gateway = seen.status.get("digests", {})
    infos = {worker["worker_id"]: worker["info"] for worker in seen.workers if worker["info"]}
    for name, part, make, fix in _DIGESTS:
        for revision in sorted({info.get("revision", "") for info in infos.values()}):
            owners: dict[str, list[str]] = {}
            if digest := of_gateway.get(revision, {}).get(part):
                owners[digest] = ["the gateway"]
            for worker_id, info in infos.items():
                if info.get("revision", "") == revision and (digest := info.get("digests", {}).get(part)):
                    owners.setdefault(digest, []).append(worker_id)
            if len(owners) > 1:
                shown = "; ".join(f"{', '.join(owner)}: {digest}" for digest, owner in owners.items())
                yield make(name, part, f"digests of the model's files differ: {shown}", fix)


def _fleet(seen: Examination) -> Iterator[Finding]:
    capacity = seen.status.get("capacity")
    for missing in capacity["waiting_for"] if capacity else ():
        fix = "wait while it starts; if it does not, add a Ray node with room for it, or `baton scale` to what there is"
        yield _warning("fleet-short", "fleet", f"it waits for {missing}", fix)


def _ports(seen: Examination) -> Iterator[Finding]:
    for port in seen.closed:
        fix = "open the port in the firewall between the hosts, or bind an address that others reach"
        yield _fault("port-closed", port.what, f"{port.address} cannot be reached: {port.error}", fix)


def _lanes(seen: Examination) -> Iterator[Finding]:
    hosts = {one["worker_id"]: host_of(one["address"]) for one in seen.workers}
    for worker, lane in seen.lanes:
        peer = lane["peer"].partition("#")[0]
        name, moved, busy_s = f"{worker} to {peer}", lane["num_bytes"], lane["busy_s"]
        if lane["state"] in BROKEN:
            text = f"it is {lane['state']}{': ' * bool(lane['reason'])}{lane['reason']}"
            yield _fault("lane-broken", name, text, "see docs/operating.md, lanes; the gateway computes prompts anew")
        elif lane["reason"] and hosts.get(worker) == hosts.get(peer, ""):
            text = f"it goes over {lane['transport']} on one host: {lane['reason']}"
            yield _warning("lane-detour", name, text, "give both workers one /dev/shm (--ipc, or one pod)")
        if moved >= SLOW_BYTES and busy_s and moved / busy_s < SLOW_BYTES_PER_S:
            text = f"{moved / busy_s / 1e9:.3f} GB/s over {lane['transport']}"
            yield _warning("lane-slow", name, text, "check the network between the hosts, and NCCL_SOCKET_IFNAME")


def _probes(seen: Examination) -> Iterator[Finding]:
    for probe in seen.probes:
        if probe.error:
            yield _fault("lane-silent", probe.name, f"KV did not arrive: {probe.error}", "see the logs of both workers")
        elif not all(one.same for one in probe.speeds):
            text = "the answer from moved KV is not the one that its owner computed"
            yield _fault("lane-corrupt", probe.name, text, "start with --set lanes.checksum=true; replace the hardware")
        elif probe.speeds and _is_worse(probe):
            last = probe.speeds[-1]
            text = f"{last.num_tokens:,} tokens: {last.seconds:.2f} s to move, {last.computed_s:.2f} s to compute"
            yield _warning("lane-not-worth-it", probe.name, text, "use workers of one host, or --colocated workers")


def _is_worse(probe: LaneProbe) -> bool:
    last = probe.speeds[-1]
    return last.seconds > WORSE * last.computed_s and last.seconds > last.computed_s + WORSE_S


def _host(seen: Examination) -> Iterator[Finding]:
    host = seen.host
    if host is None:
        return
    if host.shm_bytes < MIN_SHM_BYTES:
        text = f"it has {host.shm_bytes / 2**20:.0f} MiB"
        yield _warning("shm-small", "/dev/shm", text, f"give it {MIN_SHM_BYTES // 2**20} MiB or more (--shm-size)")
    elif host.shm_free_bytes < MIN_SHM_FREE * host.shm_bytes:
        text = f"{host.shm_free_bytes / 2**20:.0f} of {host.shm_bytes / 2**20:.0f} MiB are free"
        yield _fault("shm-full", "/dev/shm", text, "remove files of processes that have ended (nccl-*, psm_*)")
    if host.max_open_files < MIN_OPEN_FILES:
        text = f"a process may have {host.max_open_files:,} files open, enough for half as many streams"
        yield _warning("open-files", "this host", text, "raise the hard limit (ulimit -Hn, LimitNOFILE)")
    here = [one for one in seen.workers if host_of(one["address"]) in host.addresses]
    ranks = sum(one["info"]["layout"]["tp"] for one in here if one["info"] and one["info"]["device"] == "cpu")
    if ranks > host.num_cores:
        text = f"{ranks} ranks compute on {host.num_cores} cores"
        yield _warning("cores", "this host", text, "start fewer workers, or give the container more CPUs")


def _redis(seen: Examination) -> Iterator[Finding]:
    redis = seen.redis
    if redis is None:
        return
    if redis.error:
        yield _fault("redis-unreachable", redis.url, redis.error, "start it, or name another with --redis")
        return
    numbers = tuple(int(one) for one in redis.version.split(".")[:2] if one.isdigit())
    if numbers < REDIS_VERSION:
        fix = f"use {'.'.join(map(str, REDIS_VERSION))} or later"
        yield _fault("redis-version", redis.url, f"it is Redis {redis.version}", fix)
    if redis.eviction not in ("noeviction", ""):
        text = f"maxmemory-policy is {redis.eviction}: keys of limits and workers may be evicted"
        yield _warning("redis-eviction", redis.url, text, "redis-cli config set maxmemory-policy noeviction")
    if redis.round_trip_s > REDIS_ROUND_TRIP_S:
        text = f"a round trip takes {1000 * redis.round_trip_s:.0f} ms"
        yield _warning("redis-slow", redis.url, text, "run it in the gateways' own network")


RULES: Sequence[Rule] = (
    _gateway, _troubles, _certificates, _clock, _workers, _digests, _fleet, _ports, _lanes, _probes, _host, _redis,
)  # fmt: skip
