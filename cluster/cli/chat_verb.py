"""`baton chat`: a conversation in the terminal, streamed. Also answers one message, or questions from a pipe, one a
line."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.text import Text

from cluster.cli.admin_client import (
    DEFAULT_URL,
    GatewayUrl,
    ServedModel,
    error_of,
    find_model,
    no_answer,
    open_client,
    raise_for_error,
)
from protos.errors import BatonError, ContextLengthExceeded, Misconfigured, Unavailable

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"
RESERVED_SHARE = 1 / 4
"""Share of the context that is kept free for the next answer."""
CHAT_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's, for a model without defaults of its own: at OpenAI's, which cut no tail, small models ramble."""
_TIMEOUT = httpx.Timeout(10.0, read=600.0)


def chat(
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Print the answer to this alone, and end.")
    ] = None,
    url: GatewayUrl = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="A served model. Default: the first one.")] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message at the start of the conversation.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own, else 0.8.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens that have this share of the probability.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: what the context holds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: the same one gives the same answers.")] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="Sent as a bearer token.")] = "",
) -> None:
    """Talk to the model. /reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."""
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    if message is not None and not message.strip():
        raise Misconfigured("MESSAGE is empty: give a text, or leave it out for a conversation", param="message")
    with open_client(url, api_key) as client:
        served = find_model(client, model)
        if served.default_sampling == {}:
            sampling = CHAT_SAMPLING | sampling
        terminal = Terminal(Conversation(system, served.max_model_len), Asker(client, served, sampling), Console())
        if not (terminal.run(sys.stdin) if message is None else terminal.answer(message)):
            raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExchange:
    question: str
    answer: str
    num_tokens: int


class Conversation:
    """The messages that still fit the context, as the server counts them: the oldest exchanges are dropped first,
    `system` never."""

    def __init__(self, system: str, max_model_len: int | None) -> None:
        self._system = system
        self._limit = math.inf if max_model_len is None else max_model_len * (1 - RESERVED_SHARE)
        self.exchanges: list[ChatExchange] = []

    @property
    def num_tokens(self) -> int:
        return sum(exchange.num_tokens for exchange in self.exchanges)

    def messages(self, question: str) -> list[dict[str, str]]:
        sent = [{"role": "system", "content": self._system}] if self._system else []
        for exchange in self.exchanges:
            sent.append({"role": "user", "content": exchange.question})
            sent.append({"role": "assistant", "content": exchange.answer})
        return [*sent, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, num_tokens: int | None) -> None:
        """`num_tokens`: of the whole conversation, if the server has reported it."""
        cost = max(0, (num_tokens or 0) - self.num_tokens)
        self.exchanges.append(ChatExchange(question=question, answer=answer, num_tokens=cost))

    def make_room(self) -> int:
        """Drops the oldest exchanges until there is room for an answer. Returns the number dropped."""
        num_before = len(self.exchanges)
        while self.num_tokens > self._limit:
            del self.exchanges[0]
        return num_before - len(self.exchanges)

    def forget(self) -> bool:
        """Drops the oldest exchange; False if there is none."""
        if not self.exchanges:
            return False
        del self.exchanges[0]
        return True

    def reset(self) -> None:
        self.exchanges.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A part of an answer; the last parts have the finish reason and the tokens of the whole conversation."""

    text: str = ""
    finish_reason: str = ""
    num_tokens: int | None = None


class Asker:
    def __init__(self, client: httpx.Client, served: ServedModel, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._body = {"model": served.name, "stream": True, "stream_options": {"include_usage": True}, **sampling}

    def __call__(self, messages: list[dict[str, str]]) -> Generator[Said, None, None]:
        """Yields parts as they arrive. Raises BatonError, also in the middle. Closing it makes the server stop
        generating."""
        body = self._body | {"messages": messages}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=_TIMEOUT) as response:
                if response.is_error:
                    response.read()
                    raise_for_error(response)
                yield from _parts(response.iter_lines())
        except httpx.HTTPError as error:
            raise no_answer(self._client, error) from error


def _parts(lines: Iterable[str]) -> Iterator[Said]:
    """Parts from server-sent events. Raises the error in an event, or Unavailable for a stream without an end."""
    finished = False
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
            if event.get("error"):
                raise error_of(data, 500)
            for choice in event.get("choices") or ():
                finished = finished or bool(choice.get("finish_reason"))
                text = (choice.get("delta") or {}).get("content") or ""
                yield Said(text=text, finish_reason=choice.get("finish_reason") or "")
            if usage := event.get("usage"):
                yield Said(num_tokens=usage["prompt_tokens"] + usage["completion_tokens"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unavailable(f"the server sent an invalid event: {data[:200]}") from error
    if not finished:
        raise Unavailable("the answer broke off: the server ended the stream")


class Terminal:
    """Sends a question, prints the answer and appends both. A failed question is printed; from a pipe it also sets the
    exit code."""

    def __init__(self, conversation: Conversation, ask: Asker, console: Console) -> None:
        self._conversation = conversation
        self._ask = ask
        self._console = console
        self._person = False
        self._whole = True

    def run(self, source: Any) -> bool:
        """Runs until the end of the text stream `source`. False if a question from a pipe failed."""
        self._person = source.isatty()
        if self._person:
            self._note(HELP)
        for line in _typed(self._console) if self._person else source:
            question = line.strip()
            if question == "/quit":
                break
            if question == "/reset":
                self._conversation.reset()
                self._note("forgotten")
            elif question.startswith("/") and self._person:
                self._note(HELP)
            elif question:
                self._turn(question)
        return self._person or self._whole

    def answer(self, question: str) -> bool:
        """Answers one question. False if that failed."""
        self._turn(question.strip())
        return self._whole

    def _turn(self, question: str) -> None:
        try:
            if num := self._conversation.make_room():
                self._forgot(num)
            while True:
                try:
                    self._answer(question)
                    return
                except ContextLengthExceeded:
                    if not self._conversation.forget():
                        raise
                    self._forgot(1)
        except BatonError as error:
            self._whole = False
            self._note(error.message, style="red")

    def _answer(self, question: str) -> None:
        texts, reason, num_tokens = [], "", None
        parts = self._ask(self._conversation.messages(question))
        answered = _interruptible(parts) if self._person else parts
        try:
            for part in answered:
                texts.append(part.text)
                self._console.print(Text(_harmless(part.text)), end="", soft_wrap=True)
                reason = part.finish_reason or reason
                num_tokens = part.num_tokens if part.num_tokens is not None else num_tokens
        except KeyboardInterrupt:
            if not self._person:
                raise
            reason = "stopped"
        finally:
            answered.close()
            parts.close()
            if any(texts):
                self._console.print()
        if reason == "length":
            self._note("cut off: as long as it may be")
        elif reason == "stopped":
            self._note("stopped")
        if any(texts):
            self._conversation.add(question, "".join(texts), num_tokens)

    def _forgot(self, num: int) -> None:
        self._note(f"the context is full: forgot the oldest {'exchange' if num == 1 else f'{num} exchanges'}")

    def _note(self, note: str, style: str = "dim") -> None:
        self._console.print(Text(f"({note})", style), soft_wrap=True)


def _typed(console: Console) -> Iterator[str]:
    """Lines typed by a person, with editing and history where Python has readline. Ctrl-C drops the current line
    only."""
    with suppress(ImportError):
        import readline  # noqa: F401  # its import is its effect
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return


def _interruptible(parts: Iterator[Said]) -> Generator[Said, None, None]:
    """Raises Ctrl-C only where the next part is awaited. A console that is interrupted while it prints may print a line
    twice, or nothing more."""
    waits = met = False

    def meet(number: int, frame: object) -> None:
        nonlocal met
        met = True
        if waits:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, meet)
    try:
        while True:
            waits = True
            if met:
                raise KeyboardInterrupt
            part = next(parts, None)
            waits = False
            if part is None:
                return
            yield part
    finally:
        waits = False
        signal.signal(signal.SIGINT, before)


def _harmless(text: str) -> str:
    """Removes control characters, which could send commands to the terminal."""
    return "".join(one for one in text if one.isprintable() or one in "\n\t")
