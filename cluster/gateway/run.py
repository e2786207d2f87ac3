"""Runs a gateway, in this process or in several: starts it, passes workers to it, stops it in order."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from rich.console import Console

from cluster.config.config import ClusterConfig
from cluster.discovery.base import Discovery, StaticDiscovery
from cluster.process.gc_tuning import collect_rarely
from cluster.process.logs import LogFormat
from cluster.process.ports import listen_for_gateway
from cluster.process.signals import StopSignal, stopped, stopping
from cluster.supervision.preflight import check_files
from protos.errors import Misconfigured
from workers.models.config import longest_sequence, read_config

if TYPE_CHECKING:
    from cluster.gateway.process_supervisor import GatewayProcesses
    from cluster.gateway.server import GatewayServer
    from router.fleet.channels import Channels

log = logging.getLogger("baton.cluster")


async def run_gateway(
    config: ClusterConfig, addresses: tuple[str, ...], console: Console, log_format: LogFormat = LogFormat.TEXT
) -> bool:
    """Serves until a signal. Returns whether it was stopped in order. Raises BatonError."""
    config.check_model()
    check_discovery(config, addresses)
    check_files(config)
    stop = StopSignal()
    router = config.router
    listening = listen_for_gateway(router.host, router.port, router.grpc_port)
    front: GatewayServer | GatewayProcesses | None = None
    try:
        front = open_faces(config, listening, log_format, is_told=False, addresses=addresses)
        await stop.before(_serve(front, config, addresses))
        log.info("%s", stopping(config.supervision.grace_s if front.serves else 0.0))
        in_order = await stop.patiently(front.stop(config.supervision.grace_s))
    finally:
        if front is not None:
            await front.stop(0.0)
        listening.close()
    log.info("%s", stopped(in_order))
    return in_order


def open_faces(
    config: ClusterConfig,
    listening: socket.socket,
    log_format: LogFormat,
    *,
    is_told: bool = True,
    addresses: tuple[str, ...] = (),
) -> GatewayServer | GatewayProcesses:
    """The gateway, in this process or in several. `is_told`: workers are added to its `fleet`; otherwise its processes
    find workers themselves."""
    warn_if_open(config)
    if config.processes > 1:
        from cluster.gateway.process_supervisor import GatewayProcesses

        return GatewayProcesses(config, listening, log_format=log_format, is_told=is_told, addresses=addresses)
    from cluster.gateway.server import GatewayServer  # imports take a second, while Ray starts

    return GatewayServer(
        config.router,
        listening,
        max_model_len=max_model_len_of(config),
        tls=config.tls,
        peers=config.peers,
        index=config.index,
    )


def warn_if_open(config: ClusterConfig) -> None:
    """Warns that other machines are served without a key."""
    host = config.router.host
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and not config.router.tenants:
        log.warning(
            "%s is open to other machines, and no request needs a key, /admin included: set router.tenants "
            "(docs/operating.md), or take --host 127.0.0.1",
            host,
        )


def max_model_len_of(config: ClusterConfig) -> int:
    """The length limit of workers with the same settings. Raises Misconfigured, BadCheckpoint or UnsupportedModel."""
    return longest_sequence(read_config(config.worker.model), config.worker.max_model_len)


async def _serve(front: GatewayServer | GatewayProcesses, config: ClusterConfig, addresses: tuple[str, ...]) -> None:
    from cluster.gateway.server import GatewayServer

    await front.start()
    log.info("serving %s at %s, gRPC on port %d, as soon as workers are found", front.model, front.url, front.grpc_port)
    if isinstance(front, GatewayServer):
        collect_rarely()
        await follow(front, await discovery_of(config, addresses, front.channels))
        return
    telling = asyncio.create_task(_report_ready(front), name="ready")
    try:
        await front.wait()
    finally:
        telling.cancel()


async def _report_ready(front: GatewayProcesses) -> None:
    await front.ready()
    log.info("every gateway process is ready")


async def follow(front: GatewayServer, found: Discovery) -> None:
    """Serves the workers that discovery finds, while HTTP is served."""
    current = Gauge("baton_discovery_current", "1 while the list of workers is current", registry=front.registry)
    current.set_function(lambda: 0.0 if found.trouble else 1.0)
    front.fleet.notices.append(lambda: f"the list of workers may be old: {found.trouble}" if found.trouble else "")
    following = asyncio.create_task(found.follow(front.fleet), name="discovery")
    try:
        await front.wait()
    finally:
        following.cancel()
        await asyncio.wait([following])


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
    from cluster.discovery.redis import RedisDiscovery, connect

    return RedisDiscovery(await connect(config.discovery), learn=channels.learn)
