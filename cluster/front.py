"""The router with its faces in this process: HTTP under uvicorn and the inference service over gRPC, on one loop."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from cluster.cutoff import Cutoff
from protos.tls import FaceTls, PeerTls
from router.admission.admission import Admission
from router.admission.metrics import AdmissionCollector
from router.admission.reception import Reception
from router.admission.registry import open_limits
from router.app import create_app
from router.canary import Canary, by_one_worker
from router.choosing import Routing, routing_of
from router.client import channels_of
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.fleet_metrics import FleetCollector
from router.gateway import open_gateway
from router.grpc_face import GrpcFace
from router.metrics import RequestMetrics
from router.moving_metrics import MovingCollector
from router.policies.registry import policy_of
from router.predict_metrics import PredictionCollector
from router.prefix.registry import MEMORY, open_index

LAST_WORDS_S = 1.0  # for an error to reach a client that was cut off


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided for the whole process, not for one face of it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """Made on the event loop it runs on, from a socket that listens already. Workers join `fleet`.

    Raises Misconfigured or BadCheckpoint when the model's tokenizer cannot be read or the policy does not exist.
    """

    def __init__(
        self,
        config: RouterConfig,
        listening: socket.socket,
        *,
        max_model_len: int | None = None,
        tls: FaceTls,
        peers: PeerTls,
        index: str = MEMORY,
    ) -> None:
        policy, routing = policy_of(config), routing_of(config)
        tls.check()
        self._scheme = "https" if tls.cert else "http"
        gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        prefixes, self._others = open_index(index, model=config.model_name, gateway_id=gateway_id)
        self.fleet = Fleet(
            index=prefixes,
            config=config,
            gateway_id=gateway_id,
            open_channel=channels_of(peers),
            peers=self._others,
            observe=routing.observe,
        )
        metrics = RequestMetrics()
        self.registry = metrics.registry
        self.registry.register(FleetCollector(self.fleet))
        self.registry.register(PredictionCollector(self.fleet.predictor, routing.shadows))
        dispatcher = Dispatcher(fleet=self.fleet, policy=policy, config=config, routing=routing)
        alone = Dispatcher(fleet=self.fleet, policy=by_one_worker(policy), config=config, routing=Routing())
        self._canary = Canary(dispatcher, alone=alone, every=config.canary_every)
        self.registry.register(MovingCollector(dispatcher.moves, dispatcher.pulls, self._canary))
        admission = Admission(self._canary, fleet=self.fleet, config=config)
        self.registry.register(AdmissionCollector(admission))
        reception = self._reception = Reception(
            Path(config.tenants) if config.tenants else None,
            limits=open_limits(index, model=config.model_name),
            registry=self.registry,
            changed=lambda roster: admission.weigh({name: tenant.weight for name, tenant in roster.tenants.items()}),
        )
        self._generate = Cutoff(admission)
        gateway = open_gateway(
            config,
            generate=self._generate,
            fleet=self.fleet,
            metrics=metrics,
            reception=reception,
            routing=routing,
            max_model_len=max_model_len,
        )
        self.model = gateway.card.name
        self._has_chat = gateway.template is not None
        self._listening = listening
        settings = uvicorn.Config(
            create_app(gateway), http="httptools", ws="none", lifespan="off", access_log=False, log_config=None,
            ssl_certfile=tls.cert or None, ssl_keyfile=tls.key or None,
        )  # fmt: skip
        self._http = _Server(settings)
        self._grpc = GrpcFace(gateway, host=config.host, port=config.grpc_port, tls=tls)
        self._serving: asyncio.Task[None] | None = None
        self.grpc_port = config.grpc_port

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    @property
    def url(self) -> str:
        host = str(self._listening.getsockname()[0])
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"{self._scheme}://{reachable}:{self.port}"

    def example(self) -> str:
        """A request to try."""
        path, asked = "completions", '"prompt": "Once upon a time", "max_tokens": 32'
        if self._has_chat:
            path = "chat/completions"
            asked = '"messages": [{"role": "user", "content": "What does os.path.join do?"}]'
        told = f'{{"model": {json.dumps(self.model)}, {asked}}}'
        return f"curl {self.url}/v1/{path} -H 'content-type: application/json' -d '{told}'"

    async def start(self) -> None:
        """From now on /health answers; /ready does when a worker has joined. Raises Misconfigured: a port is taken."""
        if self._others is not None:
            await self._others.start()
        self.grpc_port = await self._grpc.start()
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listening]), name="http")

    async def wait(self) -> None:
        """Returns when HTTP is not served any more."""
        assert self._serving is not None, "start() comes first"
        await asyncio.shield(self._serving)

    async def ready(self) -> None:
        """Returns once a request would be served."""
        now = asyncio.get_running_loop().time
        while not self.fleet.ready():
            await self.fleet.wait(until=now() + 60.0)

    async def stop(self, grace_s: float) -> None:
        """Takes no new requests, lets those that run finish for `grace_s`, fails the rest. Cancelled: fails all now."""
        self._http.config.timeout_graceful_shutdown = int(grace_s + LAST_WORDS_S + 1)
        self._http.should_exit = True
        stopping: list[asyncio.Task[None]] = [asyncio.create_task(self._grpc.stop(grace_s + LAST_WORDS_S))]
        if self._serving is not None:
            stopping.append(self._serving)
        try:
            await asyncio.wait(stopping, timeout=grace_s)
        finally:
            self._generate.cut()
            await asyncio.wait(stopping, timeout=LAST_WORDS_S)
            self._http.force_exit = True
            for task in stopping:
                task.cancel()
            await asyncio.wait(stopping)
            await self._canary.close()
            await self.fleet.close()
            await self._reception.close()
            if self._others is not None:
                await self._others.close()
            self._listening.close()
