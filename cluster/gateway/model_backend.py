"""One model behind a gateway's address: its fleet, its way from requests to workers, and the tasks that go with it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from cluster.gateway.shutdown import Cutoff
from router.auth.auth import AccessControl
from router.batches.open_batches import BatchService
from router.build_router import Router, build_router
from router.files.batch_storage import BatchStorage
from router.fleet.channels import Channels
from router.fleet.sleep import SleepWatch
from router.fleet_owner import CapacityOwner, NoFleetOwner
from router.gateway import Gateway, open_gateway
from router.http.pace import Pace
from router.observe.history import HistorySampler
from router.observe.ledger.journal import RowJournal
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList, read_prices
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.reporter import CapacityReporter
from router.observe.request_observer import RequestObserver
from router.observe.samples import RequestSamples
from router.prefix.registry import open_feed
from router.request_metrics import RequestMetrics
from router.router_config import RouterConfig

log = logging.getLogger("baton.gateway")

if TYPE_CHECKING:
    from router.observe.exporter import TraceExporter


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A model of a gateway with the settings of its fleet.

    `config`: its address, tenants and ledger are those of the first model. `fleet_owner`: None without one.
    """

    config: RouterConfig
    max_model_len: int | None = None
    fleet_owner: CapacityOwner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts that the models behind one address share. `index`: where prefix indices are, as in the settings.
    `storage`: of batches, None without one."""

    index: str
    replica_ports: Sequence[int]
    channels: Channels
    storage: BatchStorage | None
    ledger: LedgerStore | None
    prices: PriceList
    pace: Pace


class ModelBackend:
    """Construct it on its event loop. `open` makes the gateway once the access control exists, which all models share.
    Workers are added to `fleet`."""

    def __init__(self, settings: ModelSettings, shared: SharedParts) -> None:
        config = settings.config
        self._settings, self._shared = settings, shared
        self._gateway_id = f"gateway-{uuid.uuid4().hex[:12]}"
        self.metrics = RequestMetrics(model=config.model_name)
        self._feed = open_feed(shared.index, model=config.model_name, gateway_id=self._gateway_id)
        self.router: Router = build_router(
            config, feed=self._feed, open_channel=shared.channels, registry=self.registry
        )
        self.fleet, self.admission = self.router.fleet, self.router.admission
        self._generate = Cutoff(self.admission)
        self._telemetry = _trace_exporter(config, self._gateway_id, self.registry)
        self._samples = RequestSamples()
        self._batches = BatchService(config.batch, shared.storage)
        self._ledger: RequestLedger | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None  # the ledger looks until no request runs

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def open(self, access: AccessControl) -> Gateway:
        """The model's gateway. Raises Misconfigured or BadCheckpoint."""
        shared, settings = self._shared, self._settings
        if shared.ledger is not None:
            model, budgets = settings.config.model_name, access.budgets
            self._ledger = RequestLedger(shared.ledger, shared.prices, self.fleet, model=model, budgets=budgets)
        observers: list[RequestObserver | None] = [access.metrics, self._samples, self._telemetry, self._ledger]
        opened = open_gateway(
            settings.config, generate=self._generate, fleet=self.fleet, max_model_len=settings.max_model_len
        )
        self.gateway = replace(
            opened, metrics=self.metrics, access=access, routing=self.router.routing, pace=shared.pace,
            observers=tuple(observer for observer in observers if observer is not None), ledger=self._ledger,
            fleet_owner=settings.fleet_owner or NoFleetOwner(), batches=self._batches.storage,
            replica_ports=shared.replica_ports,
        )  # fmt: skip
        self._reporter = CapacityReporter(
            self._gateway_id, self.gateway.fleet_owner, self._samples, self.registry,
            records=self.router.routing.records, fleet=self.fleet, line=self.admission,
        )  # fmt: skip
        self._sampler = HistorySampler(opened.history, metrics=self.metrics, fleet=self.fleet, line=self.admission)
        return self.gateway

    async def start(self) -> None:
        """Connects to the gateways of the same model, and begins background work."""
        if self.gateway.revisions is not None:
            self.gateway.revisions.follow(self.fleet.revisions, self.fleet.revision)
        await self._feed.start()
        self._tasks = [
            asyncio.create_task(SleepWatch(self.fleet.sleep, self.fleet, self.gateway.fleet_owner).run(), name="sleep"),
            asyncio.create_task(self._reporter.run(), name="capacity"),
        ]
        if self._ledger is not None:
            self._following = asyncio.create_task(self._ledger.follow(), name="ledger")
        self._sampler.start()

    def start_batches(self) -> None:
        self._batches.start(
            self.gateway, generate=self.router.idle, records=self.router.idle_records, registry=self.registry
        )

    async def pause(self) -> None:
        """Ends what runs beside requests; those continue."""
        for task in self._tasks:
            task.cancel()
        await self._batches.stop()
        self._sampler.close()

    def cut(self) -> None:
        self._generate.cut()

    async def close(self) -> None:
        """The last call, when no request runs."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self.router.close()
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.close)
        await self.gateway.fleet_owner.close()
        self.gateway.texts.grammars.close()
        await self._feed.close()

    async def until_ready(self) -> None:
        now = asyncio.get_running_loop().time
        while not self.fleet.ready():
            await self.fleet.offers.wait(until=now() + 60.0)


def _trace_exporter(config: RouterConfig, gateway_id: str, registry: CollectorRegistry) -> TraceExporter | None:
    if not config.telemetry.endpoint:
        return None
    from router.observe.exporter import TraceExporter  # OpenTelemetry's SDK, only where it is used

    exporter = TraceExporter(config.telemetry, model=config.model_name, gateway_id=gateway_id)
    registry.register(exporter)
    return exporter


def open_ledger(config: RouterConfig) -> tuple[LedgerStore | None, PriceList]:
    """Raises Misconfigured."""
    if not config.has_ledger:
        return None, PriceList()
    prices = read_prices(Path(config.ledger.prices)) if config.ledger.prices else PriceList()
    database = ledger_database(config.database or Path(config.ledger.path))
    return LedgerStore(database, keep_days=config.ledger.keep_days, journal=_open_journal(config)), prices


def _open_journal(config: RouterConfig) -> RowJournal | None:
    """Opens the journal beside the file of SQLite; for Postgres in a folder of this host, named after the database's
    URL."""
    if config.database:
        name = f"baton-ledger-{os.getuid()}-{zlib.crc32(config.database.encode()):08x}"
        folder = Path(tempfile.gettempdir()) / name
    else:
        folder = Path(f"{config.ledger.path}-rows")
    try:
        return RowJournal(folder)
    except OSError as error:
        log.warning("rows that are not in the ledger yet are lost with this process: %s: %s", folder, error)
        return None
