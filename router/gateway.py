"""The parts that all faces share: the model's card and texts, the path to the workers, and the one path of an
answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from protos.errors import InvalidRequest, UnknownModel
from protos.hints import listed
from protos.values import Adapter
from router.auth.auth import AccessControl
from router.capacity.samples import RequestSamples
from router.dispatch.chooser import Routing
from router.files.batch_storage import BatchStorage
from router.fleet_owner import CapacityOwner, NoFleetOwner
from router.grammar.checker import GrammarChecks
from router.history.history import History
from router.http.middleware import random_names
from router.http.pace import Pace
from router.http.sse import SseWriter
from router.jobs import FleetView, Generate
from router.ledger.request_ledger import RequestLedger, is_refused
from router.request_metrics import RequestMetrics, Track
from router.revisions.texts import ModelTexts, RevisionTexts, open_texts
from router.router_config import RouterConfig
from router.streaming.token_sink import TokenSink, compiled
from router.text.chat_template import ChatTemplate, Message
from router.text.model_card import ModelCard
from router.text.reasoning import Reasoning
from router.text.sampling_request import TextRequest, check_length
from router.text.text_stream import NO_USAGE, TextDelta, UsageCounter, answer
from router.text.tokenizer import Tokenizer
from router.tools.formats import ToolFormat
from router.traces.request_trace import RequestTrace

if TYPE_CHECKING:
    from router.telemetry.exporter import TraceExporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything a face needs.

    - `wall_clock`: seconds since 1970, for the `created` of answers only
    - `tool_format`: the model's tool-call format, None if unknown
    - `tool_tokens`: texts of that format that are tokens of their own, with their ids
    - `reasoning`: the model's reasoning format, None for a model that does not reason
    - `revisions`: of a fleet whose model a roll may replace; the fields above are of its first one
    - `model_aliases`: patterns of further names of the model
    - `batches`: files and batches, None where none are kept
    - `replica_ports`: of the gateway processes that share a port, the one of each; empty for a single process
    - `models`: every model behind this address, this one first; empty where there is one
    - `beside`: the other models behind this address, of a gateway that answers for its own model only
    - `scraped`: what /metrics shows, None for the registry of `metrics`
    - `disable_any_whitespace`: JSON bound by a grammar has no white space outside of strings
    - `pooling`: of vectors, where a request has none
    - `split_special_tokens`: special tokens in a text prompt are text unless its request decides; in messages they
      always are
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generate: Generate
    fleet: FleetView
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    access: AccessControl = field(default_factory=AccessControl)
    routing: Routing = field(default_factory=Routing)
    pace: Pace = field(default_factory=Pace)
    replica_ports: Sequence[int] = ()
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    tool_format: ToolFormat | None = None
    tool_tokens: Mapping[str, int] = field(default_factory=dict)
    reasoning: Reasoning | None = None
    revisions: RevisionTexts | None = None
    model_aliases: tuple[str, ...] = ()
    disable_any_whitespace: bool = False
    split_special_tokens: bool = False
    pooling: str = "last"
    wall_clock: Callable[[], float] = time.time
    names: Iterator[str] = field(default_factory=random_names)
    telemetry: TraceExporter | None = None
    fleet_owner: CapacityOwner = field(default_factory=NoFleetOwner)
    ledger: RequestLedger | None = None
    batches: BatchStorage | None = None
    history: History = field(default_factory=History)
    samples: RequestSamples = field(default_factory=RequestSamples)
    models: tuple[Gateway, ...] = ()
    beside: tuple[Gateway, ...] = ()
    scraped: CollectorRegistry | None = None

    def new_id(self, prefix: str) -> str:
        """A name that no other request has; some APIs put an underscore behind the prefix, others a dash."""
        return f"{prefix}{'' if prefix.endswith('_') else '-'}{next(self.names)}"

    def ready(self) -> bool:
        """Whether a request of one model at least would be served."""
        return any(one.fleet.ready() or bool(one.fleet.asleep()) for one in self.each)

    @property
    def each(self) -> tuple[Gateway, ...]:
        """The gateway of every model behind this address."""
        return self.models or (self,)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`, the same in all APIs: of the files, and of how workers keep weights and KV."""
        return self.card.served_fingerprint(self.fleet.stored_as(self.card.revision))

    @property
    def widest(self) -> ModelCard:
        """The limits of a body whose model is not known yet."""
        if not self.models:
            return self.card
        cards = [one.card for one in self.models]
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
                self.tokenizer.vocabulary.texts,
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
        """True for the name and the aliases of a model behind this address, and names of adapters."""
        return self._found(name) is not None

    def serving(self, name: str, track: Track | None = None) -> Gateway:
        """The gateway of one request to this model, or to an adapter of it, by whose card the answer is made, and whose
        metrics the `track` is in from now on. During a roll it is of either revision. Raises UnknownModel."""
        one, adapter = self._named(name)
        if track is not None:
            track.belongs_to(one.metrics)
        texts = one.revisions.current() if one.revisions is not None else None
        if texts is not None:
            one = one._revised(texts)
        return one if adapter is None else replace(one, card=one.card.of_adapter(name, adapter.adapter_id))

    def _revised(self, texts: ModelTexts) -> Gateway:
        return replace(
            self, card=texts.card, tokenizer=texts.tokenizer, template=texts.template, tool_format=texts.tool_format,
            tool_tokens=texts.tool_tokens, reasoning=texts.reasoning,
        )  # fmt: skip

    def _named(self, name: str) -> tuple[Gateway, Adapter | None]:
        """Raises UnknownModel."""
        found = self._found(name)
        if found is None:
            served = listed([f"'{name}'" for one in self.each for name in (one.card.name, *one.fleet.adapters())])
            raise UnknownModel(f"The model '{name[:100]}' does not exist: this server serves {served}", param="model")
        return found

    def _found(self, name: str) -> tuple[Gateway, Adapter | None] | None:
        """Names of models come first, then those of adapters, then aliases, which are patterns."""
        for one in self.each:
            if name == one.card.name:
                return one, None
        for one in self.each:
            if (adapter := one.fleet.adapters().get(name)) is not None:
                return one, adapter
        for one in self.each:
            if any(fnmatchcase(name, _pattern(alias)) for alias in one.model_aliases):
                return one, None
        return None

    def owner(self, model: str) -> Gateway:
        """The gateway of one of the models behind this address, which knows the others."""
        if not self.models:
            return self
        return next(one for one in self.models if one.card.name == model).among(self.models)

    def among(self, models: Sequence[Gateway]) -> Gateway:
        """Knows these, of which it is one, and answers for its own model only."""
        return replace(self, beside=tuple(one for one in models if one is not self))

    def check_batch_model(self, name: str) -> None:
        """Raises UnknownModel for a request of a batch that is not of this model."""
        if not self.serves(name) and any(one.serves(name) for one in self.beside):
            raise UnknownModel(
                f"a batch is of one model, that of its first request ({self.card.name}): give requests for "
                f"{name[:100]} a batch of their own",
                param="model",
            )
        self._named(name)

    def check_adapter_name(self, name: str) -> None:
        """Raises InvalidRequest for a name that a model behind this address has, or an adapter of another model."""
        for one in (*self.each, *self.beside):
            if name == one.card.name:
                taken = f"is the name of the model {'itself' if one.fleet is self.fleet else 'beside this one'}"
            elif name in one.model_aliases:
                taken = f"is an alias of the model {one.card.name}"
            elif one.fleet is not self.fleet and name in one.fleet.adapters():
                taken = f"is an adapter of the model {one.card.name}"
            else:
                continue
            raise InvalidRequest(f"{name!r} {taken}: give the adapter another one", param="name")

    def check_tools(self) -> None:
        """Raises InvalidRequest where the model is shown none."""
        if self.template is not None and not self.template.shows_tools:
            raise InvalidRequest(
                f"The model '{self.card.name}' does not support tools: its chat template has no place for them; "
                "give baton one that has, with --chat-template FILE",
                param="tools",
            )

    @property
    def has_tools(self) -> bool:
        """Can the model be shown tools, and its calls be read?"""
        return self.template is not None and self.template.shows_tools and self.tool_format is not None

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool | None = None, split_special_tokens: bool | None = None
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt, with what the tokenizer puts round a text unless `add_special_tokens` is False.
        Raises ContextLengthExceeded before reading a text that cannot fit."""
        for text in texts:
            check_length(self.tokenizer.min_tokens(text), self.card, is_least=True)
        add_special_tokens = add_special_tokens is not False
        if self.split_special_tokens if split_special_tokens is None else split_special_tokens:
            controls = self.tokenizer.controls if self.template is None else self.template.controls
            return await self.tokenizer.encode_plain(texts, controls, add_special_tokens=add_special_tokens)
        return await self.tokenizer.encode(texts, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        param: str = "messages",
    ) -> tuple[int, ...]:
        """The prompt of a conversation, which the client gave as `param`. Raises InvalidRequest for a model without a
        chat template, and with the template's words."""
        if self.template is None:
            raise InvalidRequest(
                f"The model '{self.card.name}' has no chat template: send its prompt to /v1/completions",
                param=param,
            )
        if tools:
            self.check_tools()
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other: set one of them to false",
                param="continue_final_message",
            )
        try:
            rendered = await self.template.prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=options,
                tools=tools,
            )
        except InvalidRequest as error:
            error.param = param if error.param == "messages" else error.param
            raise
        check_length(self.tokenizer.min_tokens(rendered.text), self.card, param=param, is_least=True)
        return await self.tokenizer.encode_rendered(rendered)

    async def answer(
        self,
        ask: TextRequest,
        track: Track,
        tally: UsageCounter | None = None,
        *,
        is_plain: bool = False,
        writer: SseWriter | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """The request's pieces as they arrive, measured, counted in `tally` and against the tenant's limit. Of an
        answer that `is_plain` only the text is needed: a `TokenSink` sends tokens by the `writer`, if there is one,
        ahead of the pieces. Closing it early closes every job. Raises RateLimited."""
        access, pace, counted = self.access, self.pace, tally or UsageCounter(ask)
        track.belongs_to(self.metrics)
        sinks = self._sinks(ask, track, writer) if is_plain and not ask.silent else []
        track.tenant, track.jobs = ask.tenant.name, ask.jobs
        most_usd = self.ledger.most_usd(ask, self.card.name) if self.ledger is not None else 0.0
        await access.enter(ask.tenant, ask.request_id, sum(map(len, ask.prompts)), most_usd=most_usd)
        error: BaseException | None = None
        records: Sequence[RequestTrace] = ()
        try:
            records = self.routing.records.open(ask.jobs)
            self.samples.arrived(len(records))
            if self.ledger is not None:
                self.ledger.begun(ask, records, counted, track.endpoint, access.key_id, self.card.name)
            pieces = answer(self.generate, ask, self.tokenizer.vocabulary, sinks)
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
            self.routing.records.close(ask.jobs, error)
            self.samples.ended(records)
            usage = NO_USAGE if is_refused(error, records, counted) else counted.usage()
            track.used(usage)
            if self.telemetry is not None:
                self.telemetry.ended(ask, records, usage, track.endpoint, error)
            if self.ledger is not None:
                self.ledger.ended(ask, records, usage, track.endpoint, error, access.key_id, self.card.name)
            if usage is not NO_USAGE:
                access.served(
                    ask.tenant,
                    num_prompt=usage.prompt_tokens,
                    num_cached=usage.cached_tokens,
                    num_output=usage.completion_tokens,
                )


def open_gateway(
    config: RouterConfig,
    *,
    generate: Generate,
    fleet: FleetView,
    metrics: RequestMetrics | None = None,
    access: AccessControl | None = None,
    routing: Routing | None = None,
    replica_ports: Sequence[int] = (),
    max_model_len: int | None = None,
    telemetry: TraceExporter | None = None,
    fleet_owner: CapacityOwner | None = None,
    ledger: RequestLedger | None = None,
    batches: BatchStorage | None = None,
    pace: Pace | None = None,
) -> Gateway:
    """Reads tokenizer, chat template and defaults from the checkpoint. Raises Misconfigured."""
    texts = open_texts(config, max_model_len=max_model_len)
    return Gateway(
        card=texts.card,
        tokenizer=texts.tokenizer,
        template=texts.template,
        tool_format=texts.tool_format,
        tool_tokens=texts.tool_tokens,
        reasoning=texts.reasoning,
        revisions=RevisionTexts(config, texts),
        disable_any_whitespace=config.text.disable_any_whitespace,
        split_special_tokens=config.text.split_special_tokens,
        pooling=config.text.pooling,
        generate=generate,
        fleet=fleet,
        metrics=metrics or RequestMetrics(),
        access=access or AccessControl(),
        routing=routing or Routing(),
        replica_ports=replica_ports,
        max_body_bytes=config.http.max_body_bytes,
        body_timeout_s=config.http.body_timeout_s,
        keep_alive_s=config.http.keep_alive_s,
        stall_s=config.http.stall_s,
        cors_origins=_names(config.http.cors_origins),
        hosts=(config.host, *_names(config.http.hosts)),
        model_aliases=_names(config.model_aliases),
        telemetry=telemetry,
        fleet_owner=fleet_owner or NoFleetOwner(),
        ledger=ledger,
        batches=batches,
        pace=pace or Pace(),
    )


def _pattern(alias: str) -> str:
    """A pattern in which of fnmatch's signs only "*" is one in an alias."""
    return re.sub(r"[?\[]", r"[\g<0>]", alias)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
