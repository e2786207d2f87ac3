"""The parts that all faces share: the model's card and texts, the path to the workers, and the one path of an
answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from protos.errors import InvalidRequest, UnknownModel
from protos.model_files.opening import open_model
from router.auth.auth import AccessControl
from router.config import RouterConfig
from router.dispatch.chooser import Routing
from router.grammar.checker import GrammarChecks
from router.http.middleware import random_names
from router.http.pace import Pace
from router.http.sse import SseWriter
from router.jobs import FleetView, Generate
from router.metrics import RequestMetrics, Track
from router.replicas.peers import PeerProcesses
from router.streaming.token_sink import TokenSink, compiled
from router.text.chat_template import ChatTemplate, Message
from router.text.model_card import ModelCard
from router.text.sampling_request import TextRequest, check_length
from router.text.text_stream import TextDelta, UsageCounter, answer
from router.text.tokenizer import Tokenizer
from router.text.tool_call_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything a face needs.

    - `wall_clock`: seconds since 1970, for the `created` of answers only
    - `tool_format`: the model's tool-call format, None if unknown
    - `model_aliases`: patterns of further names of the model
    - `disable_any_whitespace`: JSON bound by a grammar has no white space outside of strings
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
    processes: PeerProcesses = field(default_factory=PeerProcesses)
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    cors_origins: tuple[str, ...] = ()
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    tool_format: ToolFormat | None = None
    model_aliases: tuple[str, ...] = ()
    disable_any_whitespace: bool = False
    split_special_tokens: bool = False
    wall_clock: Callable[[], float] = time.time
    names: Iterator[str] = field(default_factory=random_names)

    def new_id(self, prefix: str) -> str:
        """A name that no other request has; some APIs put an underscore behind the prefix, others a dash."""
        return f"{prefix}{'' if prefix.endswith('_') else '-'}{next(self.names)}"

    def ready(self) -> bool:
        """Would a request be served, whichever process gets it?"""
        return self.processes.settled and self.fleet.ready()

    def _sinks(self, ask: TextRequest, track: Track, writer: SseWriter | None) -> Sequence[TokenSink]:
        if compiled() is None:
            return []
        sinks = [
            TokenSink(
                self.tokenizer.vocabulary.texts,
                track.times(index),
                self.pace,
                writer.events(index) if writer is not None else None,
                skip_special_tokens=ask.skip_special_tokens,
                stops=ask.stop,
            )
            for index in range(len(ask.jobs))
        ]
        if writer is not None:
            writer.sinks = sinks
        return sinks

    def serves(self, name: str) -> bool:
        """True for the model's name and its aliases."""
        return name == self.card.name or any(fnmatchcase(name, alias) for alias in self.model_aliases)

    def check_model(self, name: str) -> None:
        """Raises UnknownModel."""
        if not self.serves(name):
            raise UnknownModel(
                f"The model '{name[:100]}' does not exist: this server serves '{self.card.name}'", param="model"
            )

    def check_tools(self) -> None:
        """Raises InvalidRequest where the model is shown none."""
        if self.template is not None and not self.template.shows_tools:
            raise InvalidRequest(
                f"The model '{self.card.name}' does not support tools: its chat template has no place for them",
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
            check_length(self.tokenizer.min_tokens(text), self.card)
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
    ) -> tuple[int, ...]:
        """The prompt of a conversation. Raises InvalidRequest for a model without a chat template."""
        if self.template is None:
            raise InvalidRequest(
                f"The model '{self.card.name}' has no chat template: send its prompt to /v1/completions",
                param="messages",
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
        rendered = await self.template.prompt(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
            tools=tools,
        )
        check_length(self.tokenizer.min_tokens(rendered.text), self.card, param="messages")
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
        sinks = self._sinks(ask, track, writer) if is_plain and not ask.silent else []
        track.tenant = ask.tenant.name
        await access.enter(ask.tenant, ask.request_id, sum(map(len, ask.prompts)))
        error: BaseException | None = None
        try:
            self.routing.records.open(ask.jobs)
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
            usage = counted.usage()
            track.used(usage)
            if usage.completion_tokens:
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
    processes: PeerProcesses | None = None,
    max_model_len: int | None = None,
) -> Gateway:
    """Reads tokenizer, chat template and defaults from the checkpoint. Raises Misconfigured."""
    files = open_model(config.model_path)
    tokenizer = Tokenizer.load(files)
    if compiled() is not None:
        _ = tokenizer.vocabulary.texts  # before the first request, which would wait for them
    template = ChatTemplate.load(files, tokenizer.named_tokens, tokenizer.added_tokens)
    return Gateway(
        card=ModelCard.load(files, config.model_name, max_model_len=max_model_len),
        tokenizer=tokenizer,
        template=template,
        tool_format=_tool_format(config.text.tool_parser, template),
        disable_any_whitespace=config.text.disable_any_whitespace,
        split_special_tokens=config.text.split_special_tokens,
        generate=generate,
        fleet=fleet,
        metrics=metrics or RequestMetrics(),
        access=access or AccessControl(),
        routing=routing or Routing(),
        processes=processes or PeerProcesses(),
        max_body_bytes=config.http.max_body_bytes,
        body_timeout_s=config.http.body_timeout_s,
        keep_alive_s=config.http.keep_alive_s,
        stall_s=config.http.stall_s,
        cors_origins=_names(config.http.cors_origins),
        model_aliases=_names(config.model_aliases),
    )


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def _tool_format(name: str, template: ChatTemplate | None) -> ToolFormat | None:
    if name == "auto":
        return template.tool_format if template is not None else None
    return ToolFormat(name)
