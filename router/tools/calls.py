"""What the calls of every format are: functions in, parts of calls out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A tool the model may call; `parameters` is a JSON Schema. Of a `strict` one every keyword is enforced."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters, by name."""
        found = (self.parameters or {}).get("properties")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A part of call `index`. The first part has its `name`, later parts have ""."""

    index: int
    name: str = ""
    arguments: str = ""


Part = str | CallDelta
"""Parts of an answer: text, or a part of a call."""


class CallReader(Protocol):
    """Reads one answer, in pieces of any size."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """Text that was held back because it might have become a call."""
        ...

    @property
    def num_calls(self) -> int:
        """The part of it that was sent."""
        ...


class HeldText:
    """The part of an answer that was not sent yet: the base of readers."""

    def __init__(self) -> None:
        self._held = ""
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held and self._take(parts):
            pass
        return parts

    def _take(self, parts: list[Part]) -> bool:
        """Consumes a part of the held text. False: it needs more text, or has consumed all."""
        raise NotImplementedError


def say(parts: list[Part], text: str) -> None:
    if text:
        parts.append(text)
