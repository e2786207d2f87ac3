"""How the texts of a model become tokens and back: read from its checkpoint, for each revision of a rolled fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protos.errors import BatonError, IncompatibleWorkers, InvalidRequest, Misconfigured
from protos.model_files.opening import open_model
from protos.values import WorkerInfo
from router.fleet.fleet_revisions import FleetRevisions
from router.router_config import RouterConfig, TextConfig, listed_in
from router.text.chat_template import ChatTemplate, Message
from router.text.grammar.checker import GrammarChecks
from router.text.model_card import ModelCard
from router.text.reasoning import Reasoning
from router.text.sampling_request import SamplingRequest, check_length
from router.text.tokenizer import Tokenizer
from router.text.tools.formats import ToolFormat, format_of, tag_tokens

log = logging.getLogger("baton.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTexts:
    """How one revision of a model turns text into tokens and back.

    - `tool_format`: the model's format of tool calls, None if it is unknown
    - `tool_tokens`: the texts of that format that are single tokens, with their ids
    - `reasoning`: the model's reasoning format, None for a model that does not reason
    - `grammars`: shared by all revisions
    - `common`: the fingerprint of the files; revisions in which it is equal have the same token ids
    """

    card: ModelCard
    tokenizer: Tokenizer
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    template: ChatTemplate | None = None
    tool_format: ToolFormat | None = None
    tool_tokens: Mapping[str, int] = field(default_factory=dict)
    reasoning: Reasoning | None = None
    config: TextConfig = field(default_factory=TextConfig)
    common: str = ""

    def check_tools(self) -> None:
        """Raises InvalidRequest if the template shows no tools."""
        if self.template is not None and not self.template.shows_tools:
            raise InvalidRequest(
                f"The model '{self.card.name}' does not support tools: its chat template has no place for them; "
                "give baton one that has, with --chat-template FILE",
                param="tools",
            )

    @property
    def has_tools(self) -> bool:
        return self.template is not None and self.template.shows_tools and self.tool_format is not None

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool | None = None,
        split_special_tokens: bool | None = None,
        asked: SamplingRequest | None = None,
    ) -> list[tuple[int, ...]]:
        """Raises ContextLengthExceeded before it reads a text that cannot fit."""
        for index, text in enumerate(texts):
            param = (asked or SamplingRequest()).prompt_name(index, len(texts))
            check_length(self.tokenizer.min_tokens(text), self.card, param=param, is_least=True)
        add_special_tokens = add_special_tokens is not False
        if self.config.split_special_tokens if split_special_tokens is None else split_special_tokens:
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
        salt: bytes | None = None,
    ) -> tuple[int, ...]:
        """With the `salt` of its KV the next turn of a conversation is read faster. Raises InvalidRequest, for the
        client's `param`."""
        if self.template is None:
            raise InvalidRequest(
                f"The model '{self.card.name}' has no chat template: send its prompt to /v1/completions", param=param
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
        return await self.tokenizer.encode_rendered(rendered, salt=salt)


def open_texts(config: RouterConfig, *, model: Path | None = None, max_model_len: int | None = None) -> ModelTexts:
    """Reads the configured checkpoint, or `model`. Raises Misconfigured or BadCheckpoint."""
    files = open_model(config.model_path if model is None else model)
    tokenizer = Tokenizer.load(files)
    _ = tokenizer.vocabulary.texts  # computed before the first request, which would wait
    template = ChatTemplate.load(files, tokenizer.named_tokens, tokenizer.added_tokens, file=config.text.chat_template)
    reasoning = _reasoning(config.text.reasoning_parser, template, tokenizer)
    tool_format = _tool_format(config.text.tool_parser, template, reasoning)
    card = ModelCard.load(files, config.model_name, max_model_len=max_model_len, sampling=config.text.sampling)
    return ModelTexts(
        card=replace(card, aliases=listed_in(config.model_aliases)),
        tokenizer=tokenizer,
        template=template,
        tool_format=tool_format,
        tool_tokens=tag_tokens(tool_format, tokenizer.vocabulary) if tool_format is not None else {},
        reasoning=reasoning,
        config=config.text,
        common=files.fingerprint(),
    )


class RevisionTexts:
    """The texts of each revision of the fleet, by its name. The first one is ""."""

    def __init__(self, config: RouterConfig, first: ModelTexts) -> None:
        self._config = config
        self._known = {"": first}
        self._begin: Callable[[], str] = lambda: ""

    def follow(self, revisions: FleetRevisions, begin: Callable[[], str]) -> None:
        """`begin` chooses the revision of a request."""
        self._begin = begin
        revisions.open_texts = self.open

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        return {revision: texts.card for revision, texts in self._known.items()}

    def current(self) -> ModelTexts:
        return self._known[self._begin()]

    def check(self, model: Path) -> str:
        """Returns the fingerprint of a model that is about to be rolled out. Raises Misconfigured or BadCheckpoint."""
        return open_texts(self._config, model=model).common

    async def open(self, info: WorkerInfo) -> str:
        """Opens the texts of a worker's revision and returns their `common`. Raises IncompatibleWorkers."""
        if info.revision not in self._known:
            try:
                texts = await asyncio.to_thread(
                    open_texts, self._config, model=Path(info.model_path), max_model_len=info.max_model_len
                )
            except BatonError as error:
                raise IncompatibleWorkers(
                    f"{info.worker_id} serves {info.model_path}, which this gateway cannot read: {error.message}",
                    param="model",
                ) from error
            card = replace(texts.card, revision=info.revision)
            self._known[info.revision] = replace(texts, card=card, grammars=self._known[""].grammars)
            log.info("requests may be served by revision %s from now on: %s", info.revision, info.model_path)
        return self._known[info.revision].common


def _tool_format(name: str, template: ChatTemplate | None, reasoning: Reasoning | None) -> ToolFormat | None:
    """Raises Misconfigured."""
    shown = format_of(template.tool_source) if template is not None else None
    form = shown if name == "auto" else ToolFormat(name)
    has_channels = reasoning is not None and reasoning.name == "gpt_oss"
    if form is not ToolFormat.GPT_OSS or has_channels:
        return form
    if name == "auto":
        return None
    raise Misconfigured(
        "router.text.tool_parser is gpt_oss: it needs router.text.reasoning_parser gpt_oss, which reads channels",
        param="router.text.tool_parser",
    )


def _reasoning(name: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> Reasoning | None:
    """Raises Misconfigured for a format whose marks this tokenizer does not have."""
    parser = (template.reasoning_format if template is not None else None) if name == "auto" else name
    if parser is None or parser == "none":
        return None
    reasoning = Reasoning(parser, tokenizer.vocabulary)
    if reasoning.is_usable:
        return reasoning
    if name == "auto":
        return None
    raise Misconfigured(
        f"router.text.reasoning_parser = {name}: this model's tokenizer has no tokens for its marks; take auto or none",
        param="router.text.reasoning_parser",
    )
