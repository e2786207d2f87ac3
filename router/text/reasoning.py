"""Reasoning in a model's answer: how each family of models marks it, and how it is separated from the answer.

    think      <think> reasoning </think> answer                     DeepSeek-R1, Qwen3, GLM-4.5 and later
    mistral    [THINK] reasoning [/THINK] answer                     Magistral, later Mistral models
    seed_oss   <seed:think> reasoning </seed:think> answer           Seed-OSS
    harmony    <|channel|>analysis<|message|> reasoning <|end|>      gpt-oss
               <|start|>assistant<|channel|>final<|message|> answer

A mark that is a token of its own is found by its id, so that the same characters written by other tokens stay text. A
prompt may open the reasoning, or close it at once (`enable_thinking = false`): `Reasoning.phase` reads its end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import orjson

from protos.codec import Value
from router.text.grammar.structure import literal
from router.text.stop_strings import overlap
from router.text.vocabulary import Vocabulary

_TAIL = 8  # tokens at the end of a prompt that may hold a mark and white space behind it
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

CALL, ARGUMENTS, CALL_END = "\ud800", "\ud801", "\ud802"
"""Around the name and the arguments of a call in a harmony answer's text: lone surrogates, which no token has."""


class Phase(IntEnum):
    """Where an answer is. BEFORE: its first text decides whether it reasons."""

    BEFORE = 0
    INSIDE = 1
    AFTER = 2


class ReasoningMarks(Value, frozen=True, kw_only=True):
    """`open` and `close` are texts around reasoning. `is_open`: an answer begins inside unless its prompt closed it."""

    open: str
    close: str
    is_open: bool = False


_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
_CHANNEL, _MESSAGE, _START, _END, _CALL, _CONSTRAIN, _RETURN = _HARMONY

FORMATS: Mapping[str, ReasoningMarks | None] = {
    "deepseek_r1": ReasoningMarks(open="<think>", close="</think>", is_open=True),
    "qwen3": ReasoningMarks(open="<think>", close="</think>"),
    "mistral": ReasoningMarks(open="[THINK]", close="[/THINK]"),
    "seed_oss": ReasoningMarks(open="<seed:think>", close="</seed:think>"),
    "command_r": ReasoningMarks(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    "gpt_oss": None,  # channels
}
"""By the names of `router.text.reasoning_parser`."""

# Marks in the chat template of a family: the first that occurs decides.
_SIGNS = {
    "<|channel|>analysis": "gpt_oss",
    "[THINK]": "mistral",
    "<seed:think>": "seed_oss",
    "<|START_THINKING|>": "command_r",
    "</think>": "qwen3",
}


def format_of(template: str) -> str | None:
    return next((name for sign, name in _SIGNS.items() if sign in template), None)


class ReasoningReader(Protocol):
    @property
    def is_inside(self) -> bool:
        """True if the next token is reasoning, as far as is known."""
        ...

    @property
    def is_clear(self) -> bool:
        """Whether the next token's text continues the last one's, reasoning or answer, unless it is a mark."""
        ...

    def feed(self, token_id: int, text: str) -> tuple[str, str]:
        """The text that the token adds to the reasoning and to the answer."""
        ...

    def end(self) -> tuple[str, str]: ...


class Reasoning:
    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self.name = name
        self._marks = FORMATS[name]
        self._vocabulary = vocabulary
        texts = _HARMONY if self._marks is None else (self._marks.open, self._marks.close)
        marks = {text.encode(): text for text in texts}
        by_text = {marks[raw]: i for i, raw in enumerate(vocabulary.token_bytes) if raw in marks}
        is_known = len(by_text) == len(texts) if self._marks is not None else by_text.keys() >= {_CHANNEL, _MESSAGE}
        self._ids: Mapping[str, int] = by_text if is_known else {}
        self.ids = frozenset(self._ids.values())

    @property
    def is_usable(self) -> bool:
        """Whether the marks can be read: those of channels must be tokens of this tokenizer."""
        return self._marks is not None or bool(self._ids)

    @property
    def end_texts(self) -> tuple[str, ...]:
        return () if self._marks is None or self._ids else (self._marks.close,)

    def phase(self, prompt: Sequence[int], *, is_continued: bool = False) -> Phase:
        """The phase after a prompt. A prompt that `is_continued` ends with the beginning of the answer."""
        if self._marks is None:
            return self._channel(prompt)
        tail = prompt if is_continued else prompt[-_TAIL:]
        text = b"".join(map(self._vocabulary.bytes_of, tail)).decode(errors="replace").rstrip()
        if is_continued:
            return Phase.INSIDE if text.rfind(self._marks.open) > text.rfind(self._marks.close) else Phase.AFTER
        if text.endswith(self._marks.close):
            return Phase.AFTER
        return Phase.INSIDE if self._marks.is_open or text.endswith(self._marks.open) else Phase.BEFORE

    def _channel(self, prompt: Sequence[int]) -> Phase:
        """Returns AFTER if the prompt has begun a message."""
        last = next((token_id for token_id in reversed(prompt[-_TAIL:]) if token_id in self.ids), None)
        return Phase.AFTER if last is not None and last == self._ids[_MESSAGE] else Phase.BEFORE

    def reader(self, phase: Phase, *, marks_calls: bool) -> ReasoningReader:
        """`marks_calls`: calls stand in the answer's text with CALL, ARGUMENTS and CALL_END around them."""
        if self._marks is None:
            return ChannelReader(self._ids, in_message=phase is Phase.AFTER, marks_calls=marks_calls)
        if self._ids:
            return MarkedTokens(self._ids[self._marks.open], self._ids[self._marks.close], phase)
        return MarkedText(self._marks, phase)

    def grammar(self, answer: str, phase: Phase, ends: Collection[int], *, has_header: bool = False) -> str:
        """A grammar of reasoning followed by the `answer`; with channels `has_header` says that the answer has its own
        header. Reasoning contains none of the `ends`. Tokens are written as numbers: the grammar is not shown to
        clients."""
        if phase is Phase.AFTER:
            return answer
        first = (
            self._channel_rules(ends, has_header) if self._marks is None else self._mark_rules(self._marks, phase, ends)
        )
        if answer.lstrip().startswith("{"):  # a list with one grammar, as the library writes it
            *others, own = orjson.loads(answer)["grammars"]
            assert not others, "the library's functions make one grammar"
        else:
            own = {"lark_grammar": answer}
        return orjson.dumps({"grammars": [{"lark_grammar": first}, own | {"name": "answer"}]}).decode()

    def _mark_rules(self, marks: ReasoningMarks, phase: Phase, ends: Collection[int]) -> str:
        if self._ids:
            opened, closed = f"<[{self._ids[marks.open]}]>", f"<[{self._ids[marks.close]}]>"
            rules = [f"thoughts: {_other_than(ends, self._ids[marks.close])}* {closed}"]
        else:
            opened = literal(marks.open)
            rules = [f"thoughts[lazy]: TEXT {literal(marks.close)}", "TEXT: /(?s:.*)/"]
        thinks = "thoughts" if phase is Phase.INSIDE else f"({opened} thoughts)?"
        return "\n".join([f"start: {thinks} SPACE @answer", r"SPACE: /\n{0,2}/", *rules])

    def _channel_rules(self, ends: Collection[int], has_header: bool) -> str:
        channel, message, start, end = (f"<[{self._ids[mark]}]>" for mark in (_CHANNEL, _MESSAGE, _START, _END))
        other = _other_than(ends, self._ids[_END])
        thoughts = f'thoughts: {channel} "analysis" {message} {other}* {end} {start} "assistant"'
        header = "" if has_header else f'{channel} "final" {message} '
        return f"start: thoughts* {header}@answer\n{thoughts}"


def _other_than(ends: Collection[int], close: int) -> str:
    return f"<[^{','.join(map(str, sorted({*ends, close})))}]>"


class AnswerReasoning(Value, frozen=True, kw_only=True):
    """How the reasoning of a request's answers is read. Reasoning that is not `is_shown` is counted only."""

    reasoning: Reasoning
    phase: Phase
    marks_calls: bool = False
    is_shown: bool = True

    def reader(self) -> ReasoningReader:
        return self.reasoning.reader(self.phase, marks_calls=self.marks_calls)


class MarkedTokens:
    """Marks that are tokens. White space behind a mark is dropped."""

    def __init__(self, opened: int, closed: int, phase: Phase) -> None:
        self._open = opened
        self._close = closed
        self._phase = phase
        self._space = ""  # before the first text of a part
        self._is_fresh = phase is not Phase.AFTER

    @property
    def is_inside(self) -> bool:
        return self._phase is Phase.INSIDE

    @property
    def is_clear(self) -> bool:
        return not self._is_fresh

    def feed(self, token_id: int, text: str) -> tuple[str, str]:
        if token_id == self._close and self._phase is Phase.INSIDE:
            return self._turn(Phase.AFTER)
        if token_id == self._open and self._is_fresh and self._phase is not Phase.AFTER:
            return self._turn(Phase.INSIDE)
        if self._is_fresh:
            if not text.strip():
                self._space += text
                return "", ""
            self._is_fresh = False
            if self._phase is Phase.BEFORE:
                self._phase = Phase.AFTER
                return "", self._space + text
            text = text.lstrip()
        return (text, "") if self._phase is Phase.INSIDE else ("", text)

    def _turn(self, phase: Phase) -> tuple[str, str]:
        self._phase, self._is_fresh, self._space = phase, True, ""
        return "", ""

    def end(self) -> tuple[str, str]:
        return "", self._space if self._phase is Phase.BEFORE else ""


class MarkedText:
    """Finds marks that are no tokens: text that may begin one is held back."""

    def __init__(self, marks: ReasoningMarks, phase: Phase) -> None:
        self._marks = marks
        self._phase = phase
        self._held = ""
        self._is_fresh = phase is not Phase.AFTER

    @property
    def is_inside(self) -> bool:
        return self._phase is Phase.INSIDE

    @property
    def is_clear(self) -> bool:
        return not (self._is_fresh or self._held)

    def feed(self, token_id: int, text: str) -> tuple[str, str]:
        if self._phase is Phase.AFTER:
            return "", self._fresh(text)
        self._held += text
        begun = self._held.lstrip()
        if self._is_fresh and self._marks.open.startswith(begun) and begun != self._marks.open:
            return "", ""
        if self._is_fresh and begun.startswith(self._marks.open):
            self._phase, self._held = Phase.INSIDE, begun.removeprefix(self._marks.open)
        elif self._phase is Phase.BEFORE:
            self._phase, self._is_fresh = Phase.AFTER, False
            return "", self._take(len(self._held))
        inside, mark, behind = self._held.partition(self._marks.close)
        if mark:
            inside = self._fresh(inside)
            self._phase, self._is_fresh, self._held = Phase.AFTER, True, ""
            return inside, self._fresh(behind)
        return self._fresh(self._take(len(self._held) - overlap(self._held, self._marks.close))), ""

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _fresh(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text

    def end(self) -> tuple[str, str]:
        held = self._take(len(self._held))
        return (held, "") if self._phase is Phase.INSIDE else ("", held)


class ChannelReader:
    """Reads harmony's messages: a header after <|start|> or at the beginning, <|message|>, a text, and its end. The
    channel analysis is reasoning, messages to functions are calls, all else is the answer."""

    def __init__(self, ids: Mapping[str, int], *, in_message: bool, marks_calls: bool) -> None:
        self._names = {token_id: text for text, token_id in ids.items()}
        self._marks_calls = marks_calls
        self._header: list[str] | None = None if in_message else []
        self._kind = "answer"  # of the message: reasoning, answer or call
        self._is_fresh = False
        self._num_thoughts = 0
        self._has_message = in_message

    @property
    def is_inside(self) -> bool:
        return self._header is None and self._kind == "reasoning"

    @property
    def is_clear(self) -> bool:
        return self._header is None and not self._is_fresh and self._kind != "call"

    def feed(self, token_id: int, text: str) -> tuple[str, str]:
        name = self._names.get(token_id)
        if name is None:
            if self._header is not None:
                self._header.append(text)
                return "", ""
            if not text:
                return "", ""
            if self._is_fresh and self._kind == "reasoning" and self._num_thoughts:
                text = "\n" + text
            self._num_thoughts += self._is_fresh and self._kind == "reasoning"
            self._is_fresh = False
            return (text, "") if self._kind == "reasoning" else ("", text)
        if name == _MESSAGE and self._header is not None:
            return "", self._begin("".join(self._header))
        if name in (_CHANNEL, _CONSTRAIN) and self._header is not None:
            self._header.append(f" {name} ")
            return "", ""
        ended = CALL_END if self._header is None and self._kind == "call" else ""
        self._header, self._kind = [], "answer"
        return "", ended

    def _begin(self, header: str) -> str:
        self._header, self._is_fresh, self._has_message = None, True, True
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith(_FUNCTIONS):
            if self._marks_calls:
                self._kind = "call"
                return CALL + recipient[1].removeprefix(_FUNCTIONS) + ARGUMENTS
            self._kind = "answer"
        else:
            self._kind = "reasoning" if "analysis" in header.split() else "answer"
        return ""

    def end(self) -> tuple[str, str]:
        """An answer without a message is text."""
        if self._header is None or self._has_message:
            return "", ""
        return "", "".join(self._header)
