"""Finds stop strings in text that comes in pieces: text that may be the start of one is held back until it is not."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends the text at the first complete stop string; of several complete with the same character, at the longest.

    The result depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def is_clear(self) -> bool:
        return not self._held

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a stop string was `found` it must not be called again."""
        assert self.found is None
        if not self._stops:
            return text
        text = self._held + text
        matches = ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0)
        if best := min(matches, default=None):
            end, start, self.found = best
            self._held = ""
            return text[: end if self._include else start]
        num_shown = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
