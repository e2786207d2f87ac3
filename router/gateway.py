"""The parts that all faces share: the model's card and texts, the path to the workers, and the one path of an
answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from prometheus_client import CollectorRegistry

from protos.errors import InvalidRequest, UnknownModel
from protos.hints import listed
from protos.values import Adapter
from router.auth.auth import AccessControl
from router.dispatch.chooser import Routing
from router.files.batch_storage import BatchStorage
from router.fleet_owner import CapacityOwner, NoFleetOwner
from router.http.middleware import random_names
from router.http.pace import Pace
from router.http.sse import SseWriter
from router.jobs import FleetView, Generate
from router.model_texts import ModelTexts, RevisionTexts, open_texts
from router.observe.history import History
from router.observe.ledger.request_ledger import RequestLedger
from router.observe.request_observer import EndedRequest, ObservedRequest, RequestObserver
from router.request_metrics import RequestMetrics, Track, arrival
from router.router_config import HttpConfig, RouterConfig
from router.streaming.token_sink import TokenSink, compiled
from router.text.model_card import ModelCard
from router.text.sampling_request import TextRequest
from router.text.text_stream import MAX_WAITING, TextDelta, UsageCounter, answer

log = logging.getLogger("baton.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything a face needs.

    - `texts`: of the first revision, or, in the gateway of one request (`serving`), of that request's revision
    - `observers`: called when a request begins and ends
    - `wall_clock`: seconds since 1970, for the `created` of answers only
    - `ledger`: for prices and reports; None without one
    - `batches`: files and batches, None without a store
    - `replica_ports`: the own port of each gateway process that shares the port; empty for a single process
    - `models`: every model behind this address, this one first; empty if there is only one
    - `beside`: the other models behind this address, if this gateway answers for its own model only
    - `scraped`: the registry of /metrics, None for that of `metrics`
    - `max_waiting`: choices of one request that wait for their first token at a time
    """

    texts: ModelTexts
    generate: Generate
    fleet: FleetView
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    access: AccessControl = field(default_factory=AccessControl)
    routing: Routing = field(default_factory=Routing)
    observers: tuple[RequestObserver, ...] = ()
    pace: Pace = field(default_factory=Pace)
    http: HttpConfig = field(default_factory=HttpConfig)
    revisions: RevisionTexts | None = None
    wall_clock: Callable[[], float] = time.time
    names: Iterator[str] = field(default_factory=random_names)
    fleet_owner: CapacityOwner = field(default_factory=NoFleetOwner)
    ledger: RequestLedger | None = None
    batches: BatchStorage | None = None
    history: History = field(default_factory=History)
    replica_ports: Sequence[int] = ()
    models: tuple[Gateway, ...] = ()
    beside: tuple[Gateway, ...] = ()
    scraped: CollectorRegistry | None = None
    max_waiting: int = MAX_WAITING

    @property
    def card(self) -> ModelCard:
        return self.texts.card

    def new_id(self, prefix: str) -> str:
        """Some APIs put an underscore after the prefix, others a dash."""
        return f"{prefix}{'' if prefix.endswith('_') else '-'}{next(self.names)}"

    def ready(self) -> bool:
        return any(gateway.fleet.ready() or bool(gateway.fleet.asleep()) for gateway in self.each)

    @property
    def each(self) -> tuple[Gateway, ...]:
        return self.models or (self,)

    @property
    def fingerprint(self) -> str:
        return self.card.served_fingerprint(self.fleet.stored_as(self.card.revision))

    @property
    def widest(self) -> ModelCard:
        """The limits of a body whose model is not known yet."""
        if not self.models:
            return self.card
        cards = [gateway.card for gateway in self.models]
        return replace(
            self.card,
            max_model_len=max(card.max_model_len for card in cards),
            vocab_size=max(card.vocab_size for card in cards),
        )

    def _sinks(self, ask: TextRequest, track: Track, writer: SseWriter | None) -> Sequence[TokenSink]:
        if compiled() is None:
            return []
        reasoning = ask.reasoning.reasoning if ask.reasoning is not None else None
        sinks = [
            TokenSink(
                self.texts.tokenizer.vocabulary.texts,
                track.times(index),
                self.pace,
                writer.events(index) if writer is not None else None,
                skip_special_tokens=ask.skip_special_tokens,
                stops=ask.stop,
                marks=reasoning.ids if reasoning is not None else frozenset(),
                ends=reasoning.end_texts if reasoning is not None else (),
            )
            for index in range(len(ask.jobs))
        ]
        if writer is not None:
            writer.sinks = sinks
        return sinks

    def serves(self, name: str) -> bool:
        return self._found(name) is not None

    def serving(self, name: str, track: Track | None = None) -> Gateway:
        """Returns the gateway of one request to this model or adapter, with the texts of the revision that serves it;
        the `track` counts in its metrics from now on. Raises UnknownModel."""
        gateway, adapter = self._named(name)
        if track is not None:
            track.belongs_to(gateway.metrics)
        texts = gateway.texts if gateway.revisions is None else gateway.revisions.current()
        if adapter is not None:
            texts = replace(texts, card=texts.card.of_adapter(name, adapter.adapter_id))
        return gateway if texts is gateway.texts else replace(gateway, texts=texts)

    def _named(self, name: str) -> tuple[Gateway, Adapter | None]:
        """Raises UnknownModel."""
        match = self._found(name)
        if match is None:
            served = listed(
                [f"'{name}'" for gateway in self.each for name in (gateway.card.name, *gateway.fleet.adapters())]
            )
            raise UnknownModel(f"The model '{name[:100]}' does not exist: this server serves {served}", param="model")
        return match

    def _found(self, name: str) -> tuple[Gateway, Adapter | None] | None:
        """Models come before adapters, adapters before aliases."""
        for gateway in self.each:
            if name == gateway.card.name:
                return gateway, None
        for gateway in self.each:
            if (adapter := gateway.fleet.adapters().get(name)) is not None:
                return gateway, adapter
        for gateway in self.each:
            if any(fnmatchcase(name, _pattern(alias)) for alias in gateway.card.aliases):
                return gateway, None
        return None

    def owner(self, model: str) -> Gateway:
        """The gateway of one of the models at this address, with references to the others."""
        if not self.models:
            return self
        return next(gateway for gateway in self.models if gateway.card.name == model).among(self.models)

    def among(self, models: Sequence[Gateway]) -> Gateway:
        """Returns this gateway with references to the other models."""
        return replace(self, beside=tuple(gateway for gateway in models if gateway is not self))

    def check_batch_model(self, name: str) -> None:
        """Raises UnknownModel."""
        if not self.serves(name) and any(gateway.serves(name) for gateway in self.beside):
            raise UnknownModel(
                f"a batch is of one model, that of its first request ({self.card.name}): give requests for "
                f"{name[:100]} a batch of their own",
                param="model",
            )
        self._named(name)

    def check_adapter_name(self, name: str) -> None:
        """Raises InvalidRequest for a name that is taken."""
        for gateway in (*self.each, *self.beside):
            if name == gateway.card.name:
                taken = f"is the name of the model {'itself' if gateway.fleet is self.fleet else 'beside this one'}"
            elif name in gateway.card.aliases:
                taken = f"is an alias of the model {gateway.card.name}"
            elif gateway.fleet is not self.fleet and name in gateway.fleet.adapters():
                taken = f"is an adapter of the model {gateway.card.name}"
            else:
                continue
            raise InvalidRequest(f"{name!r} {taken}: give the adapter another one", param="name")

    async def answer(
        self,
        ask: TextRequest,
        track: Track,
        tally: UsageCounter | None = None,
        *,
        is_plain: bool = False,
        writer: SseWriter | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Yields the request's pieces as they arrive, measured and counted. If `is_plain`, compiled sinks send tokens
        through the `writer` ahead of the pieces. Closing it early closes every job. Raises RateLimited."""
        access, pace, records = self.access, self.pace, self.routing.records
        track.belongs_to(self.metrics)
        sinks = self._sinks(ask, track, writer) if is_plain and not ask.silent else []
        track.tenant, track.jobs = ask.tenant.name, ask.jobs
        counted = tally or UsageCounter(ask)
        request = ObservedRequest(ask, (), counted, track.endpoint, access.key_id, self.card.name)
        most_usd = self.ledger.most_usd(request) if self.ledger is not None else 0.0
        await access.enter(ask.tenant, ask.request_id, sum(map(len, ask.prompts)), most_usd=most_usd)
        came = arrival.get()
        request = request._replace(records=records.open(ask.jobs, arrived_s=came.at_s if came is not None else None))
        error: BaseException | None = None
        try:
            for observer in self.observers:
                observer.began(request)
            pieces = answer(self.generate, ask, self.texts.tokenizer.vocabulary, sinks, self.max_waiting)
            try:
                with pace.running():
                    async for piece in pieces:
                        track.saw(piece)
                        counted.add(piece)
                        access.wrote(ask.tenant, piece.num_tokens)
                        yield piece
                        if pace.gap_s and not sinks:  # else the sinks see to it
                            await asyncio.sleep(pace.gap_s)
            finally:
                await pieces.aclose()
        except BaseException as failed:
            error = failed
            raise
        finally:
            access.leave(ask.tenant, ask.request_id)
            records.close(ask.jobs, error)
            ended = EndedRequest.of(request, error)
            track.used(ended.usage)
            for observer in self.observers:
                try:
                    observer.ended(ended)
                except Exception:  # an observer's error costs neither other rows nor the answer
                    log.exception("%s has failed at the end of %s", type(observer).__name__, ask.request_id)


def _pattern(alias: str) -> str:
    return re.sub(r"[?\[]", r"[\g<0>]", alias)


def open_gateway(
    config: RouterConfig, *, generate: Generate, fleet: FleetView, max_model_len: int | None = None
) -> Gateway:
    """Reads tokenizer, chat template and defaults from the checkpoint. Raises Misconfigured."""
    texts = open_texts(config, max_model_len=max_model_len)
    return Gateway(
        texts=texts,
        revisions=RevisionTexts(config, texts),
        http=replace(config.http, hosts=f"{config.host}, {config.http.hosts}"),
        generate=generate,
        fleet=fleet,
        max_waiting=max(1, min(config.admission.max_queued, MAX_WAITING)),
    )
