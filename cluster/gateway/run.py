"""Runs a gateway, in this process or in several: starts it, passes workers to it, stops it in order."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Coroutine, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge
from rich.console import Console

from cluster.config.cluster_config import ClusterConfig
from cluster.discovery.members import Discovery, StaticDiscovery
from cluster.process.gc_tuning import collect_rarely
from cluster.process.logs import LogFormat
from cluster.process.ports import listen_for_gateway
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.supervision.preflight import check_adapter_names, check_files
from protos.errors import Misconfigured
from protos.hints import listed
from workers.models.model_config import longest_sequence
from workers.models.served import read_served

if TYPE_CHECKING:
    from cluster.gateway.gateway_server import GatewayServer
    from cluster.gateway.model_backend import ModelBackend
    from cluster.gateway.replicas import Replicas
    from router.fleet.channels import Channels
    from router.fleet_owner import CapacityOwner

log = logging.getLogger("baton.cluster")


async def run_gateway(
    configs: Sequence[ClusterConfig], addresses: tuple[str, ...], console: Console,
    log_format: LogFormat = LogFormat.TEXT,
) -> bool:  # fmt: skip
    """Serves these models until a signal. Returns whether it was stopped in order. Raises BatonError."""
    config = configs[0]
    check_adapter_names(configs)
    for one in configs:
        one.check_model()
        check_files(one)
    workers = addresses_by_model(configs, addresses)
    for one, own in zip(configs, workers, strict=True):
        check_discovery(one, own)
    stop = StopSignal()
    front = open_faces(configs, log_format, addresses=addresses)
    try:
        await stop.before(_serve(front, configs, workers))
        log.info("%s", stopping(config.supervision.grace_s if front.serves else 0.0))
        in_order = await stop.patiently(front.stop(config.supervision.grace_s))
    finally:
        await front.stop(0.0)
    log.info("%s", stopped(in_order))
    return in_order


def open_faces(
    configs: Sequence[ClusterConfig],
    log_format: LogFormat,
    *,
    addresses: tuple[str, ...] = (),
    fleet_owners: Sequence[CapacityOwner] = (),
) -> GatewayServer | Replicas:
    """The gateway of these models, in this process or in several. Without `addresses` and `discovery` the caller gives
    it workers. Without `fleet_owners` they are found as the workers are. Raises Misconfigured."""
    config = configs[0]
    warn_if_open(config)
    if config.processes > 1:
        from cluster.gateway.replicas import Replicas

        return Replicas(configs, addresses=addresses, log_format=log_format)
    router = config.router
    return open_server(
        configs, listen_for_gateway(router.host, router.port, router.grpc_port), fleet_owners=fleet_owners
    )


def open_server(
    configs: Sequence[ClusterConfig],
    listening: socket.socket,
    *,
    fleet_owners: Sequence[CapacityOwner] = (),
    own: socket.socket | None = None,
    replica_ports: Sequence[int] = (),
) -> GatewayServer:
    """Opens the gateway of these models in this process. Closes `listening` if it fails. Raises Misconfigured."""
    from cluster.gateway.gateway_server import GatewayServer  # imports take a second, while Ray starts
    from cluster.gateway.model_backend import ModelSettings

    config = configs[0]
    try:
        models = [
            ModelSettings(config=one.router, max_model_len=max_model_len_of(one), fleet_owner=owner or found_owner(one))
            for one, owner in zip_longest(configs, fleet_owners)
        ]
        return GatewayServer(
            models, listening, tls=config.tls, peers=config.peers, index=config.index, own=own,
            replica_ports=replica_ports,
        )  # fmt: skip
    except BaseException:
        listening.close()
        raise


def found_owner(config: ClusterConfig) -> CapacityOwner | None:
    """The owner of the desired fleet in the Redis of `discovery`; None without it."""
    if not config.discovery:
        return None
    from cluster.capacity.redis_fleet import RedisFleetOwner

    return RedisFleetOwner(config.discovery, fleet=config.fleet)


def warn_if_open(config: ClusterConfig) -> None:
    host = config.router.host
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and not config.router.tenants:
        log.warning(
            "%s is open to other machines, and no request needs a key, /admin included: set router.tenants "
            "(docs/security.md), or take --host 127.0.0.1",
            host,
        )


def max_model_len_of(config: ClusterConfig) -> int:
    """The length limit of workers with the same settings. Raises Misconfigured, BadCheckpoint or UnsupportedModel."""
    return longest_sequence(read_served(config.worker.model), config.worker.max_model_len)


async def _serve(
    front: GatewayServer | Replicas, configs: Sequence[ClusterConfig], addresses: Sequence[tuple[str, ...]]
) -> None:
    from cluster.gateway.gateway_server import GatewayServer

    if isinstance(front, GatewayServer):
        await serve(front, configs, addresses, _say_ready(front, configs))
        return
    await front.start()
    telling = asyncio.create_task(_say_ready(front, configs), name="ready")
    try:
        await front.wait()
    finally:
        telling.cancel()


async def serve(
    front: GatewayServer,
    configs: Sequence[ClusterConfig],
    addresses: Sequence[tuple[str, ...]],
    report: Coroutine[Any, Any, None],
) -> None:
    """Serves workers at these addresses, or discovered ones. `report` runs once the gateway listens."""
    try:
        await front.start()
    except BaseException:
        report.close()
        raise
    reporting = asyncio.create_task(report, name="report")
    collect_rarely()
    try:
        found = [await discovery_of(one, own, front.channels) for one, own in zip(configs, addresses, strict=True)]
        await follow(front, *found)
    finally:
        reporting.cancel()


async def _say_ready(front: GatewayServer | Replicas, configs: Sequence[ClusterConfig]) -> None:
    models = listed([one.router.model_name for one in configs])
    log.info("serving %s at %s, gRPC on port %d, as soon as workers are found", models, front.url, front.grpc_port)
    await front.ready()
    log.info("every gateway process is ready" if front.ports else "the gateway is ready")


async def follow(front: GatewayServer, *found: Discovery) -> None:
    """Adds the workers of each model that discovery finds, while HTTP is served."""
    following = [_begin_following(*pair) for pair in zip(front.backends, found, strict=True)]
    try:
        await front.wait()
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)


def _begin_following(backend: ModelBackend, found: Discovery) -> asyncio.Task[None]:
    current = Gauge("baton_discovery_current", "1 while the list of workers is current", registry=backend.registry)
    current.set_function(lambda: 0.0 if found.trouble else 1.0)
    backend.fleet.notices.append(lambda: f"the list of workers may be old: {found.trouble}" if found.trouble else "")
    return asyncio.create_task(found.follow(backend.fleet), name="discovery")


def addresses_by_model(configs: Sequence[ClusterConfig], given: Sequence[str]) -> list[tuple[str, ...]]:
    """The workers' addresses of each model: HOST:PORT, or NAME=HOST:PORT of several models. Raises Misconfigured."""
    if len(configs) == 1:
        return [tuple(given)]
    names = [one.router.model_name for one in configs]
    found: dict[str, list[str]] = {name: [] for name in names}
    for one in given:
        name, _, address = one.rpartition("=")
        if name not in found:
            raise Misconfigured(
                f"--worker {one}: of several models write NAME=HOST:PORT; the models are {listed(names)}",
                param="worker",
            )
        found[name].append(address)
    return [tuple(found[name]) for name in names]


def check_discovery(config: ClusterConfig, addresses: tuple[str, ...]) -> None:
    """Raises Misconfigured unless exactly one way to find workers is configured."""
    if addresses and config.discovery:
        raise Misconfigured(
            "--worker and --discovery are both given: workers are written down, or found", param="worker"
        )
    if not addresses and not config.discovery:
        raise Misconfigured(
            "no worker would ever be found: give --worker HOST:PORT or --discovery URL", param="discovery"
        )


async def discovery_of(config: ClusterConfig, addresses: tuple[str, ...], channels: Channels) -> Discovery:
    """`channels` get the workers' tokens from it. Raises Misconfigured."""
    check_discovery(config, addresses)
    from router.fleet.worker_client import WorkerClient

    async def identify(address: str) -> str:
        client = WorkerClient(address, connect_timeout_s=2.0, control_timeout_s=2.0, open_channel=channels)
        try:
            return (await client.describe()).worker_id
        finally:
            await client.close()

    if addresses:
        return StaticDiscovery(addresses, identify=identify)
    from cluster.discovery.redis_members import RedisDiscovery, connect

    return RedisDiscovery(await connect(config.discovery), learn=channels.learn, fleet=config.fleet)
