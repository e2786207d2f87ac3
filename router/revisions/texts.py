"""How the texts of a model become tokens and back: read from its checkpoint, for each revision of a rolled fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from protos.errors import BatonError, IncompatibleWorkers, Misconfigured
from protos.model_files.opening import open_model
from protos.values import WorkerInfo
from router.fleet.fleet_revisions import FleetRevisions
from router.router_config import RouterConfig
from router.text.chat_template import ChatTemplate
from router.text.model_card import ModelCard
from router.text.reasoning import Reasoning
from router.text.tokenizer import Tokenizer
from router.tools.formats import ToolFormat, format_of, tag_tokens

log = logging.getLogger("baton.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTexts:
    """The parts of a gateway that depend on the model. The fields are those of `router.gateway.Gateway`. `common`:
    equal where token ids mean the same."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_format: ToolFormat | None
    tool_tokens: Mapping[str, int]
    reasoning: Reasoning | None
    common: str


def open_texts(config: RouterConfig, *, model: Path | None = None, max_model_len: int | None = None) -> ModelTexts:
    """Reads tokenizer, chat template and defaults from a checkpoint, by default the configured one. Raises
    Misconfigured, BadCheckpoint."""
    files = open_model(config.model_path if model is None else model)
    tokenizer = Tokenizer.load(files)
    _ = tokenizer.vocabulary.texts  # before the first request, which would wait for them
    template = ChatTemplate.load(files, tokenizer.named_tokens, tokenizer.added_tokens, file=config.text.chat_template)
    reasoning = _reasoning(config.text.reasoning_parser, template, tokenizer)
    tool_format = _tool_format(config.text.tool_parser, template, reasoning)
    return ModelTexts(
        card=ModelCard.load(files, config.model_name, max_model_len=max_model_len, sampling=config.text.sampling),
        tokenizer=tokenizer,
        template=template,
        tool_format=tool_format,
        tool_tokens=tag_tokens(tool_format, tokenizer.vocabulary) if tool_format is not None else {},
        reasoning=reasoning,
        common=files.fingerprint(),
    )


class RevisionTexts:
    """The texts of each revision that the fleet has had, by its name.

    The first revision, "", is the one with which the gateway was started.
    """

    def __init__(self, config: RouterConfig, first: ModelTexts) -> None:
        self._config = config
        self._known = {"": first}
        self._begin: Callable[[], str] = lambda: ""

    def follow(self, revisions: FleetRevisions, begin: Callable[[], str]) -> None:
        """Reads the texts of each revision of a fleet; `begin` chooses the revision of a request."""
        self._begin = begin
        revisions.open_texts = self.open

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        """Cards of every revision that the fleet has had."""
        return {revision: texts.card for revision, texts in self._known.items()}

    def current(self) -> ModelTexts | None:
        """The texts of a request that begins now; None for those of the first revision."""
        revision = self._begin()
        return self._known[revision] if revision else None

    def check(self, model: Path) -> str:
        """Reads the texts of a model that is about to be rolled out, and drops them. Returns the fingerprint of its
        files. Raises Misconfigured, BadCheckpoint."""
        return open_texts(self._config, model=model).common

    async def open(self, info: WorkerInfo) -> str:
        """Makes the texts of a worker's revision readable; returns what they have in common with others. Raises
        IncompatibleWorkers."""
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
            self._known[info.revision] = replace(texts, card=card)
            log.info("requests may be served by revision %s from now on: %s", info.revision, info.model_path)
        return self._known[info.revision].common


def _tool_format(name: str, template: ChatTemplate | None, reasoning: Reasoning | None) -> ToolFormat | None:
    """Raises Misconfigured."""
    shown = format_of(template.tool_source) if template is not None else None
    found = shown if name == "auto" else ToolFormat(name)
    has_channels = reasoning is not None and reasoning.name == "gpt_oss"
    if found is not ToolFormat.GPT_OSS or has_channels:
        return found
    if name == "auto":
        return None
    raise Misconfigured(
        "router.text.tool_parser is gpt_oss: it needs router.text.reasoning_parser gpt_oss, which reads channels",
        param="router.text.tool_parser",
    )


def _reasoning(name: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> Reasoning | None:
    """Raises Misconfigured for a format whose marks this tokenizer does not have."""
    found = (template.reasoning_format if template is not None else None) if name == "auto" else name
    if found is None or found == "none":
        return None
    reasoning = Reasoning(found, tokenizer.vocabulary)
    if reasoning.is_usable:
        return reasoning
    if name == "auto":
        return None
    raise Misconfigured(
        f"router.text.reasoning_parser = {name}: this model's tokenizer has no tokens for its marks; take auto or none",
        param="router.text.reasoning_parser",
    )
