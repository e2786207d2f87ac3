"""The proposers that `worker.speculate` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from protos.errors import Misconfigured
from workers.speculation.proposer import Proposer
from workers.speculation.proposers.ngram import NgramProposer
from workers.speculation.proposers.prediction import PredictionProposer
from workers.speculation.proposers.suffix import SuffixProposer
from workers.speculation.speculation import Speculation

OFF = "off"
AUTO = "auto"
MODES = (AUTO, OFF, "ngram", "suffix")
WITH_PATH = ("model", "eagle", "medusa")
"""Modes that name a checkpoint: as "model:PATH"."""
IN_THE_TARGET = "mtp"
BY_A_MODEL = (*WITH_PATH, IN_THE_TARGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateMode:
    """`worker.speculate`, as "ngram" or "model:PATH"."""

    kind: str
    path: str = ""

    @classmethod
    def of(cls, text: str) -> SpeculateMode:
        kind, _, path = text.partition(":")
        return cls(kind=kind, path=path)

    @property
    def is_by_model(self) -> bool:
        return self.kind in BY_A_MODEL

    @property
    def is_head(self) -> bool:
        return self.is_by_model and self.kind != "model"

    def absolute(self) -> str:
        return f"{self.kind}:{Path(self.path).absolute()}" if self.path else self.kind


def check_mode(mode: str, param: str) -> None:
    """Raises Misconfigured for anything but `MODES`, or one of `WITH_PATH` with its path."""
    named = SpeculateMode.of(mode)
    choices = ", ".join((*MODES, *(f"{kind}:PATH" for kind in WITH_PATH), IN_THE_TARGET))
    if named.kind in WITH_PATH:
        if not named.path:
            raise Misconfigured(f"{param} is {mode!r}: name the checkpoint, as {named.kind}:/models/draft", param=param)
    elif mode not in (*MODES, IN_THE_TARGET):
        raise Misconfigured(f"{param} is {mode!r}: choose one of {choices}", param=param)


def speculation_of(mode: str, *, max_drafts: int, max_bytes: int) -> Speculation | None:
    """The speculation of a worker whose `worker.speculate` is `mode`; None if it is off. `max_bytes` bounds what is
    kept of past answers. A client's prediction is always used. A proposer that computes with a model is added once the
    worker has made it."""
    if mode == OFF:
        return None
    if SpeculateMode.of(mode).is_by_model:
        return Speculation([PredictionProposer()], max_drafts=max_drafts)
    makers: Mapping[str, Callable[[], Proposer]] = {
        "ngram": NgramProposer,
        "suffix": lambda: SuffixProposer(max_bytes),
    }
    names = makers if mode == AUTO else (mode,)
    return Speculation([PredictionProposer(), *(makers[name]() for name in names)], max_drafts=max_drafts)
