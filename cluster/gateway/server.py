"""The router with its faces in this process: HTTP under uvicorn and the inference service over gRPC, on one loop."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from cluster.gateway.shutdown import Cutoff
from cluster.process.fd_limit import raise_limit
from cluster.process.ports import example, url_of
from protos.tls import FaceTls, PeerTls
from router.app import create_app
from router.auth.auth import AccessControl
from router.auth.limits import TenantLimits
from router.auth.registry import open_limits
from router.build import build_router
from router.config import RouterConfig
from router.fleet.channels import Channels
from router.gateway import open_gateway
from router.grpc.service import GrpcFace
from router.http.protocol import HttpProtocol
from router.metrics import RequestMetrics
from router.prefix.registry import MEMORY, open_index
from router.replicas.load_gossip import LoadGossip
from router.replicas.peers import PeerProcesses, SingleProcessApp, http_socket

LAST_WORDS_S = 1.0  # time for an error to reach a client that is cut off
DATE_PERIOD_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop, for all its faces."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """`serve` closes its connections and returns."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wakes once a second for the Date header. uvicorn's own loop checks ten times a second whether to exit, half
        of an idle process's CPU time."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_PERIOD_S):
                    await self._stopping.wait()

    def protocol(self, config: uvicorn.Config | None = None, lost: Callable[[], None] | None = None) -> Any:
        """Protocol for a connection that another process accepted. This server closes it in order when it stops; `lost`
        is called when it has ended."""
        config = config or self.config
        if not config.loaded:
            config.load()
        kind: Any = config.http_protocol_class
        made = kind(config=config, server_state=self.server_state, app_state={})
        if lost is not None:
            end = made.connection_lost

            def connection_lost(error: Exception | None) -> None:
                end(error)
                lost()

            made.connection_lost = connection_lost
        return made


class GatewayServer:
    """Constructed on the event loop that runs it, from a listening socket. Workers are added to `fleet`.

    Without `listening` another process accepts connections, and `adopt` takes them: this is one gateway process of
    several, and all share a gRPC port.

    Raises Misconfigured or BadCheckpoint if the model's tokenizer cannot be read or the policy does not exist.
    """

    def __init__(
        self,
        config: RouterConfig,
        listening: socket.socket | None,
        *,
        max_model_len: int | None = None,
        tls: FaceTls,
        peers: PeerTls,
        index: str = MEMORY,
        processes: PeerProcesses | None = None,
        limits: TenantLimits | None = None,
    ) -> None:
        tls.check()
        self._is_secure, self._asks_for_keys = bool(tls.cert), bool(config.tenants)
        self._processes = processes or PeerProcesses()
        gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        prefixes, self._others = open_index(
            index, model=config.model_name, gateway_id=gateway_id, processes=self._processes
        )
        self.channels = Channels(peers)
        metrics = RequestMetrics(model=config.model_name)
        self.registry = metrics.registry
        router = self._router = build_router(
            config, gateway_id=gateway_id, index=prefixes, peers=self._others, open_channel=self.channels,
            registry=self.registry,
        )  # fmt: skip
        self.fleet, admission = router.fleet, router.admission
        self._shared_load = self._share_load()
        access = self._access = AccessControl(
            Path(config.tenants) if config.tenants else None,
            limits=limits or open_limits(index, model=config.model_name),
            registry=self.registry,
            changed=lambda roster: admission.weigh({name: tenant.weight for name, tenant in roster.tenants.items()}),
        )
        self._generate = Cutoff(admission)
        gateway = self._gateway = open_gateway(
            config, generate=self._generate, fleet=self.fleet, metrics=metrics, access=access,
            routing=router.routing,
            processes=self._processes, max_model_len=max_model_len,
        )  # fmt: skip
        self.model = gateway.card.name
        self.has_chat = gateway.template is not None
        self._listening = listening
        self._app = create_app(gateway)
        self._http = _Server(_settings(self._app, ssl_certfile=tls.cert or None, ssl_keyfile=tls.key or None))
        self._grpc = GrpcFace(gateway, host=config.host, port=config.grpc_port, tls=tls, is_shared=listening is None)
        self._adopting: set[asyncio.Task[None]] = set()
        self._local: asyncio.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.grpc_port = config.grpc_port

    @property
    def url(self) -> str:
        assert self._listening is not None, "the process that accepts connections has the URL"
        return url_of(self._listening, is_secure=self._is_secure)

    def example(self) -> str:
        """A request to try, as a curl command."""
        return example(self.url, self.model, has_chat=self.has_chat, asks_for_keys=self._asks_for_keys)

    async def start(self) -> None:
        """From now on /health answers; /ready does once a worker is ready. Raises Misconfigured if a port is taken."""
        raise_limit()
        if self._others is not None:
            await self._others.start()
        if self._shared_load is not None:
            await self._shared_load.start()
        self.grpc_port = await self._grpc.start()
        await self._listen_to_siblings()
        if not self._http.config.loaded:
            self._http.config.load()
        sockets = [self._listening] if self._listening is not None else []
        self._serving = asyncio.create_task(self._http.serve(sockets=sockets), name="http")

    def adopt(self, connection: socket.socket, lost: Callable[[], None]) -> None:
        """Serves a connection that another process has accepted; `lost` is called when it has ended."""
        task = asyncio.create_task(self._adopt(connection, lost))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket, lost: Callable[[], None]) -> None:
        loop, server = asyncio.get_running_loop(), self._http
        made: list[Any] = []

        def protocol() -> Any:
            made.append(server.protocol(lost=lost))
            return made[0]

        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(protocol, connection, ssl=server.config.ssl)
        except OSError:  # it has closed already, or speaks no TLS
            if not made or made[0].transport is None:
                lost()

    def _share_load(self) -> LoadGossip | None:
        """The load gossip with other processes behind the same port, if there are any."""
        processes = self._processes
        if processes.folder is None:
            return None
        fleet = self.fleet
        shared = LoadGossip(
            folder=processes.folder, number=processes.number, count=processes.count,
            take=fleet.given_elsewhere, blame=fleet.blame_elsewhere,
        )  # fmt: skip
        fleet.publish_load, fleet.publish_failure = shared.tell, shared.publish_failure
        return shared

    async def _listen_to_siblings(self) -> None:
        folder = self._processes.folder
        if folder is None:
            return
        settings, loop = _settings(SingleProcessApp(self._app)), asyncio.get_running_loop()
        path = _free(http_socket(folder, self._processes.number))
        self._local = await loop.create_unix_server(lambda: self._http.protocol(settings), path)

    async def wait(self) -> None:
        """Returns when HTTP is no longer served."""
        assert self._serving is not None, "start() comes first"
        await asyncio.shield(self._serving)

    @property
    def serves(self) -> bool:
        """Whether a request can be served."""
        return self.fleet.ready()

    async def ready(self) -> None:
        """Returns once a request can be served."""
        now = asyncio.get_running_loop().time
        while not self.fleet.ready():
            await self.fleet.wait(until=now() + 60.0)

    async def stop(self, grace_s: float) -> None:
        """Takes no new requests, lets running ones finish for `grace_s`, then fails the rest. If cancelled, fails them
        now."""
        self._http.config.timeout_graceful_shutdown = int(grace_s + LAST_WORDS_S + 1)
        self._http.stop()
        stopping: list[asyncio.Task[None]] = [asyncio.create_task(self._grpc.stop(grace_s + LAST_WORDS_S))]
        if self._serving is not None:
            stopping.append(self._serving)
        if self._local is not None:
            self._local.close()
        try:
            await asyncio.wait(stopping, timeout=grace_s)
        finally:
            self._generate.cut()
            await asyncio.wait(stopping, timeout=LAST_WORDS_S)
            self._http.force_exit = True
            for task in stopping:
                task.cancel()
            await asyncio.wait(stopping)
            await self._router.close()
            await self._access.close()
            self._gateway.grammars.close()
            await self._processes.close()
            if self._others is not None:
                await self._others.close()
            if self._shared_load is not None:
                await self._shared_load.close()
            if self._listening is not None:
                self._listening.close()


def _free(path: str) -> str:
    """Removes the socket of a process that died."""
    Path(path).unlink(missing_ok=True)
    return path


def _settings(app: Any, **further: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=HttpProtocol, ws="none", lifespan="off", access_log=False, log_config=None, **further
    )
