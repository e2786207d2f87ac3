"""The router with its faces in this process: HTTP under uvicorn and the inference service over gRPC, on one loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Gauge

from cluster.gateway.model_backend import ModelBackend, ModelSettings, SharedParts, open_ledger
from cluster.process.fd_limit import raise_limit
from cluster.process.ports import example, url_of
from protos.errors import Misconfigured
from protos.tls import FaceTls, PeerTls, expiry_s
from router.app import beside_each_other, create_models_app, front_of
from router.auth.auth import AccessControl
from router.auth.registry import open_limits
from router.auth.tenants import Roster
from router.batches.open_batches import storage_for
from router.faces.grpc.grpc_face import GrpcFace
from router.fleet.channels import Channels
from router.http.pace import Pace
from router.http.protocol import HttpProtocol
from router.log_throttle import RareLog
from router.observe.ledger.prices import NO_PRICES
from router.prefix.registry import MEMORY
from router.router_metrics import ModelsCollector

log = logging.getLogger("baton.cluster")

LAST_WORDS_S = 1.0  # time for an error to reach a client that is cut off
DATE_PERIOD_S = 1.0
IDLE_S = 75
"""A connection without a request is kept for longer than clients (httpx: 5 s) and load balancers (mostly 60 s) keep it:
else one that sends at that moment finds it closed."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop, for all its faces."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wakes once a second for the Date header. uvicorn's own loop checks ten times a second whether to exit, half
        of an idle process's CPU time."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_PERIOD_S):
                    await self._stopping.wait()


class GatewayServer:
    """Constructed on the event loop that runs it, from a listening socket. Workers are added to `fleet`, or, of several
    models, to the fleets of `backends`; the first model answers requests that name none, and has the common settings.

    One gateway process of several shares the ports of HTTP and gRPC with the others, and listens at its `own`, too;
    `replica_ports` are those of all.

    Raises Misconfigured or BadCheckpoint if a model's tokenizer cannot be read or its policy does not exist.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        listening: socket.socket,
        *,
        tls: FaceTls,
        peers: PeerTls,
        index: str = MEMORY,
        own: socket.socket | None = None,
        replica_ports: Sequence[int] = (),
    ) -> None:
        tls.check()
        config, is_alone = models[0].config, len(models) == 1
        self._is_secure, self._asks_for_keys = bool(tls.cert), bool(config.tenants)
        self.channels = Channels(peers)
        self._ledger, prices = open_ledger(config)
        self._storage = storage_for(config)
        shared = SharedParts(
            index=index, replica_ports=replica_ports, channels=self.channels, storage=self._storage,
            ledger=self._ledger, prices=prices, pace=Pace(),
        )  # fmt: skip
        backends = self.backends = [ModelBackend(model, shared) for model in models]
        self.fleet = backends[0].fleet
        self.registry = backends[0].registry if is_alone else CollectorRegistry(auto_describe=True)
        _register_expiry(self.registry, tls, peers)
        if self._ledger is not None:
            self.registry.register(self._ledger)
        self._has_prices = bool(prices.prices)
        self._access = AccessControl(
            Path(config.tenants) if config.tenants else None,
            limits=open_limits(index, model=config.model_name),
            registry=self.registry,
            changed=self._weigh,
        )
        if self._access.budgets.are_set and not self._has_prices:
            raise Misconfigured(NO_PRICES, param="router.ledger.path")
        gateways = [one.open(self._access) for one in backends]
        for backend, gateway in zip(backends, beside_each_other(gateways), strict=True):
            backend.gateway = gateway
        if not is_alone:
            self.registry.register(ModelsCollector({one.gateway.card.name: one.registry for one in backends}))
        self.model = gateways[0].card.name
        self.has_chat = gateways[0].texts.template is not None
        self._sockets = [listening] if own is None else [listening, own]
        self.ports = tuple(replica_ports)
        app = create_models_app(gateways, self.registry)
        self._http = _Server(server_settings(app, ssl_certfile=tls.cert or None, ssl_keyfile=tls.key or None))
        self._grpc = GrpcFace(
            front_of(gateways, self.registry), host=config.host, port=config.grpc_port, tls=tls,
            is_shared=own is not None,
        )  # fmt: skip
        self._serving: asyncio.Task[None] | None = None
        self.grpc_port = config.grpc_port

    def _weigh(self, roster: Roster) -> None:
        if not self._has_prices and any(tenant.has_budget for tenant in roster.tenants.values()):
            log.error("%s", NO_PRICES)  # at the start it is refused
        for backend in self.backends:
            backend.admission.weigh({name: tenant.weight for name, tenant in roster.tenants.items()})

    @property
    def url(self) -> str:
        return url_of(self._sockets[0], is_secure=self._is_secure)

    def example(self) -> str:
        return example(self.url, self.model, has_chat=self.has_chat, asks_for_keys=self._asks_for_keys)

    async def start(self) -> None:
        """From now on /health answers; /ready does once a worker is ready. Raises Misconfigured if a port is taken."""
        raise_limit()
        for backend in self.backends:
            await backend.start()
        self.grpc_port = await self._grpc.start()
        self._serving = asyncio.create_task(self._http.serve(sockets=self._sockets), name="http")
        for backend in self.backends:
            backend.start_batches()

    async def wait(self) -> None:
        """Returns when HTTP is no longer served."""
        assert self._serving is not None, "start() comes first"
        await asyncio.shield(self._serving)

    @property
    def serves(self) -> bool:
        return all(backend.fleet.ready() for backend in self.backends)

    async def ready(self) -> None:
        for backend in self.backends:
            await backend.until_ready()

    async def stop(self, grace_s: float) -> None:
        """Takes no new requests, lets running ones finish for `grace_s`, then fails the rest. If cancelled, fails them
        now."""
        self._http.config.timeout_graceful_shutdown = int(grace_s + LAST_WORDS_S + 1)
        self._http.stop()
        for backend in self.backends:
            await backend.pause()
        stopping: list[asyncio.Task[None]] = [asyncio.create_task(self._grpc.stop(grace_s + LAST_WORDS_S))]
        if self._serving is not None:
            stopping.append(self._serving)
        try:
            await asyncio.wait(stopping, timeout=grace_s)
        finally:
            for backend in self.backends:
                backend.cut()
            await asyncio.wait(stopping, timeout=LAST_WORDS_S)
            self._http.force_exit = True
            for task in stopping:
                task.cancel()
            await asyncio.wait(stopping)
            for backend in self.backends:
                await backend.close()
            await self._access.close()
            if self._ledger is not None:
                await asyncio.to_thread(self._ledger.close)
            if self._storage is not None:
                self._storage.close()
            for one in self._sockets:
                one.close()


def server_settings(app: Any, **further: Any) -> uvicorn.Config:
    protocol: Any = partial(HttpProtocol, crowded=RareLog(log))
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=IDLE_S,
        **further,
    )


def _register_expiry(registry: CollectorRegistry, tls: FaceTls, peers: PeerTls) -> None:
    """Registers a gauge of when the certificates end that this process has read."""
    name = "baton_certificate_expiry_timestamp_seconds"
    expiry = Gauge(name, "When a certificate ends, in seconds since 1970", ("use",), registry=registry)
    for use, cert in (("clients", tls.cert), ("peers", peers.cert)):
        if cert:
            expiry.labels(use).set(expiry_s(cert))
