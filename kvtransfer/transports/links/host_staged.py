"""Payloads in GPU memory over a network that only the host can use: every part goes through pinned memory.

GPU ── copy, queued ──▶ pinned ── gloo ══ network ══ gloo ──▶ pinned ── copy, queued ──▶ GPU"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from kvtransfer.transports.links.links import LinkWork
from kvtransfer.transports.links.staging_memory import Staging

_cuda: Any = torch.cuda


def nccl_card(device: str) -> str:
    """The identity by which NCCL distinguishes ranks: card and host. "!" and the reason without NCCL."""
    if not distributed.is_nccl_available():
        return "!this build of torch has no NCCL"
    properties = _cuda.get_device_properties(torch.device(device))
    return f"{os.environ.get('NCCL_HOSTID', '')}/{properties.uuid}"


def why_no_nccl(cards: Sequence[str]) -> str:
    """Why NCCL cannot connect the cards of a lane's ranks; "" if it can. It refuses two ranks on one card."""
    for rank, card in enumerate(cards):
        if card.startswith("!"):
            return f"rank {rank}: {card[1:]}"
        if (other := cards.index(card)) != rank:
            return f"ranks {other} and {rank} share a GPU, which NCCL refuses"
    return ""


class HostStaged:
    """Has the face of a process group, and sends and receives with another one. `host` gives pinned memory."""

    def __init__(self, group: Any, host: Staging) -> None:
        self._group = group
        self._host = host

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        (part_B,) = tensors
        staged_B = self._host.take(part_B.numel())
        staged_B.copy_(part_B, non_blocking=True)
        copied = _mark(part_B)

        def finish(timeout: timedelta) -> None:
            _wait(copied)
            self._group.send([staged_B], rank, tag).wait(timeout)

        return LinkWork(partial(self._finished, staged_B, finish))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        (part_B,) = tensors
        staged_B = self._host.take(part_B.numel())
        coming = self._group.recv([staged_B], rank, tag)

        def finish(timeout: timedelta) -> None:
            coming.wait(timeout)
            part_B.copy_(staged_B, non_blocking=True)
            _wait(_mark(part_B))

        return LinkWork(partial(self._finished, staged_B, finish))

    def _finished(self, staged_B: torch.Tensor, finish: Callable[[timedelta], None], timeout_s: float) -> None:
        try:
            finish(timedelta(seconds=timeout_s))
        except BaseException:
            self._host.discard(staged_B)  # the network may still read it, or write into it
            raise
        self._host.give(staged_B)


def _mark(part_B: torch.Tensor) -> Any:
    """An event after the work queued on the copying stream; None if copies are done when they return."""
    if not part_B.is_cuda:
        return None
    copied = _cuda.Event()
    copied.record()
    return copied


def _wait(copied: Any) -> None:
    if copied is not None:
        copied.synchronize()
