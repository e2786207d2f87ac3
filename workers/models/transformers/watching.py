"""Which linear layers of a model are used as layers only: whose weight nothing else reads in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WatchedLinear(torch.nn.Linear):
    """Notes whether it is called, and whether its weight is read outside of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["inside"] = True
        try:
            return super().forward(x)
        finally:
            self.__dict__.update(inside=False, called=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.__dict__.get("inside"):
            self.__dict__["read"] = True
        return super().__getattr__(name)


class WatchedLinears:
    def __init__(self) -> None:
        self.alone: set[str] = set()
        """Names of the layers, once they are no longer watched."""


@contextmanager
def watched_linears(model: torch.nn.Module) -> Iterator[WatchedLinears]:
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    result = WatchedLinears()
    for module in linears.values():
        module.__class__ = WatchedLinear
    try:
        yield result
    finally:
        for name, module in linears.items():
            module.__class__ = torch.nn.Linear
            notes = module.__dict__
            if notes.pop("called", False) and not notes.pop("read", False):
                result.alone.add(name)
            notes.pop("inside", None)
            notes.pop("read", None)
