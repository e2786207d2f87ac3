"""A conversation in the terminal: what is asked, what is shown, what is kept, and what is forgotten."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.admin_client import ServedModel, open_client
from cluster.cli.chat_verb import Asker, Conversation, Terminal
from cluster.cli.main import make_app
from protos.errors import Misconfigured
from router.text.model_card import ModelCard
from tests.unit.router.scripted import Scripted, byte_level, make_gateway, saying, serving

Step = str | dict[str, Any] | BaseException
FULL = httpx.Response(400, json={"error": {"message": "too long", "code": "context_length_exceeded", "param": None}})


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


class Talk(io.StringIO):
    """Questions; whether a person types them."""

    def __init__(self, *lines: str, person: bool = False) -> None:
        super().__init__("".join(f"{line}\n" for line in lines))
        self._person = person

    def isatty(self) -> bool:
        return self._person


class Screen(io.StringIO):
    """Its person presses Ctrl-C at the very moment that `interrupts_after` is shown."""

    interrupts_after = ""

    def write(self, text: str) -> int:
        num_written = super().write(text)
        if self.interrupts_after and self.interrupts_after in text:
            signal.raise_signal(signal.SIGINT)
        return num_written


class Chatting:
    """A terminal before a server that answers each request with the next of `replies`."""

    def __init__(self, *replies: Sequence[Step] | httpx.Response, system: str = "", max_len: int | None = None) -> None:
        self._replies = iter(replies)
        self.asked: list[dict[str, Any]] = []
        self._shown = Screen()
        client = httpx.Client(base_url="http://fake", transport=httpx.MockTransport(self._reply))
        asker = Asker(client, ServedModel(name="m"), {"temperature": 0.5})
        self.conversation = Conversation(system, max_len)
        self._terminal = Terminal(self.conversation, asker, Console(file=self._shown, width=200))

    def say(self, *lines: str, person: bool = False) -> bool:
        return self._terminal.run(Talk(*lines, person=person))

    def interrupt_when_shown(self, text: str) -> None:
        self._shown.interrupts_after = text

    @property
    def shown(self) -> str:
        return self._shown.getvalue()

    @property
    def messages(self) -> list[list[tuple[str, str]]]:
        return [[(message["role"], message["content"]) for message in body["messages"]] for body in self.asked]

    def _reply(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        reply = next(self._replies)
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=_events(reply))


def _events(steps: Sequence[Step]) -> Iterator[bytes]:
    for step in steps:
        if isinstance(step, BaseException):
            raise step
        yield f"data: {step if isinstance(step, str) else json.dumps(step)}\n\n".encode()


HELLO: list[Step] = [delta("Hel"), delta("lo!"), delta("", "stop"), usage(10, 2), "[DONE]"]
AGAIN: list[Step] = [delta("Again."), delta("", "stop"), usage(15, 1), "[DONE]"]


def test_answers_are_shown_and_the_conversation_is_kept() -> None:
    chat = Chatting(HELLO, AGAIN, system="Be brief.")
    assert chat.say("hi", "", "  and now?  ")
    assert chat.shown == "Hello!\nAgain.\n"
    told, first, answered = ("system", "Be brief."), ("user", "hi"), ("assistant", "Hello!")
    assert chat.messages == [[told, first], [told, first, answered, ("user", "and now?")]]
    assert chat.asked[0]["temperature"] == 0.5
    assert chat.asked[0]["stream"] is True


def test_reset_forgets_and_quit_ends() -> None:
    chat = Chatting(HELLO, AGAIN)
    assert chat.say("hi", "/reset", "again", "/quit", "never asked")
    assert chat.messages == [[("user", "hi")], [("user", "again")]]


def test_a_refused_question_is_told_and_not_kept() -> None:
    chat = Chatting(httpx.Response(503, json={"error": {"message": "no worker", "code": "no_workers"}}), AGAIN)
    assert not chat.say("hi", "again"), "a pipe's exit code tells that something was not answered"
    assert "(no worker)" in chat.shown
    assert chat.messages[1] == [("user", "again")]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([delta("Hel"), {"error": {"message": "worker died", "code": "worker_lost"}}], "(worker died)"),
        ([delta("Hel")], "broke off"),
        ([delta("Hel"), "{oops"], "an invalid event"),
        ([delta("Hel"), httpx.ReadError("reset")], "broke the answer off"),
        ([httpx.ConnectError("refused")], "baton up"),
    ],
)
def test_an_answer_that_breaks_off_is_told_and_not_kept(steps: list[Step], told: str) -> None:
    chat = Chatting(steps, AGAIN)
    assert not chat.say("hi", "again")
    assert told in chat.shown
    assert chat.messages[1] == [("user", "again")]


def test_a_cut_off_answer_says_so() -> None:
    chat = Chatting([delta("Hel", "length"), usage(10, 1), "[DONE]"])
    assert chat.say("hi")
    assert "cut off" in chat.shown


def typing(monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> None:
    """Types lines at the prompt, then Ctrl-D."""
    lines = iter(typed)

    def line(_: str) -> str:
        step = next(lines, EOFError)
        if isinstance(step, str):
            return step
        raise step

    monkeypatch.setattr("builtins.input", line)


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "hi", KeyboardInterrupt, "again")
    chat = Chatting([delta("Hel"), KeyboardInterrupt()], AGAIN)
    assert chat.say(person=True)
    assert "Hel\n(stopped)\n" in chat.shown
    assert chat.messages[1] == [("user", "hi"), ("assistant", "Hel"), ("user", "again")]


def test_ctrl_c_during_a_part_neither_loses_nor_repeats_text(monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "hi", "again")
    chat = Chatting([delta("Hel"), delta("lo")], AGAIN)
    chat.interrupt_when_shown("Hel")
    assert chat.say(person=True)
    assert "Hel\n(stopped)\nAgain." in chat.shown
    assert chat.shown.count("Hel") == 1


def test_ctrl_c_ends_a_pipe() -> None:
    with pytest.raises(KeyboardInterrupt):
        Chatting([delta("Hel"), KeyboardInterrupt()]).say("hi", "again")


def test_an_unknown_command_of_a_person_shows_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "/help")
    chat = Chatting()
    assert chat.say(person=True)
    assert chat.shown.count("/reset forgets the conversation") == 2


def test_a_model_cannot_command_the_terminal() -> None:
    chat = Chatting([delta("a\x1b]0;owned\x07\n\tb\x9b2J", "stop"), "[DONE]"])
    chat.say("hi")
    assert chat.shown == "a]0;owned\n        b2J\n"


def test_the_oldest_exchange_is_dropped_when_the_context_is_full() -> None:
    def long(total: int) -> list[Step]:
        return [delta("x", "stop"), usage(total - 1, 1), "[DONE]"]

    chat = Chatting(long(30), long(60), long(60), system="s", max_len=79)
    assert chat.say("one", "two", "three")
    assert "(the context is full: forgot the oldest exchange)" in chat.shown
    assert [text for _, text in chat.messages[2]] == ["s", "two", "x", "three"]


def test_a_server_that_counts_otherwise_is_believed() -> None:
    chat = Chatting(HELLO, AGAIN, FULL, FULL, AGAIN)
    assert chat.say("one", "two", "three")
    assert [len(messages) for messages in chat.messages] == [1, 3, 5, 3, 1]
    assert chat.messages[-1] == [("user", "three")]


def test_a_question_that_alone_is_too_long_is_refused() -> None:
    chat = Chatting(FULL)
    assert not chat.say("much too long")
    assert "(too long)" in chat.shown


async def test_the_command_against_a_gateway() -> None:
    """Typer, httpx, the real HTTP face and its chat template; only the tokens are scripted."""
    gateway = make_gateway(Scripted(saying("hello world", byte_level())))
    async with serving(gateway) as url:
        arguments = ["chat", "--url", url, "--system", "be kind", "--temperature", "0"]
        result = await asyncio.to_thread(
            CliRunner().invoke, make_app(arguments), arguments, input="hello\nhow are you\n"
        )
    assert result.exit_code == 0, result.output
    assert result.stdout == "hello world\nhello world\n"


async def test_a_message_on_the_command_line_is_answered_alone() -> None:
    """By a model without sampling defaults of its own, as by llama.cpp."""
    scripted = Scripted(saying("hello world", byte_level()))
    card = ModelCard(name="m", max_model_len=256, vocab_size=512)
    async with serving(make_gateway(scripted, card=card)) as url:
        arguments = ["chat", "What is\nthis?", "--url", url, "--top-p", "0.5"]
        result = await asyncio.to_thread(CliRunner().invoke, make_app(arguments), arguments, input="not asked\n")
    assert (result.exit_code, result.stdout) == (0, "hello world\n")
    sampling = scripted.jobs[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.5, 0.05)


def test_an_empty_message_is_refused_and_opens_no_conversation() -> None:
    """A script's variable was empty: nobody types anything."""
    result = CliRunner().invoke(make_app(["chat", " "]), ["chat", " "])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.param == "message"


def test_nobody_there(unused_tcp_port: int) -> None:
    arguments = ["chat", "--url", f"http://127.0.0.1:{unused_tcp_port}"]
    result = CliRunner().invoke(make_app(arguments), arguments, input="hello\n")
    assert result.exit_code != 0
    assert f"no cluster answers at http://127.0.0.1:{unused_tcp_port}" in str(result.exception)


def test_proxies_of_the_environment_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense")
    open_client("http://127.0.0.1:1").close()
