"""`Links` move a wire's bytes: they send to a rank and receive from one, as a process group does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousStore

HEADER_TAG = 1
PAYLOAD_TAG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRank:
    """A rank of a lane. `rank`, `size` and `peer_ranks` count over both workers: first the source's ranks, then the
    destination's. The rank `sends` KV to its peers, or it receives KV from them."""

    rank: int
    size: int
    peer_ranks: tuple[int, ...]
    sends: bool
    bind_host: str
    device: str
    config: LaneConfig

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of a lane are here, at `store`."""

    at: LaneRank
    store: RendezvousStore
    epoch: int


class LinkWork:
    """A process group's work: `wait` returns when the bytes have come, or have left. Raises RuntimeError."""

    def __init__(self, do: Callable[[float], None]) -> None:
        self._do = do

    def wait(self, timeout: timedelta) -> None:
        self._do(timeout.total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """`control` carries headers and beats, `payloads` what they announce: both have the `send` and `recv` of a process
    group, and work that can be waited for. `transport` is their name for users, `why` the reason why they are
    not faster ones.

    `flush` waits until the peers have taken out what lies in memory that is shared with them. `abort` makes
    every wait on the links fail now, at both ends, and may be called from any thread; `close` is the end.
    """

    control: Any
    payloads: Any
    transport: str
    flush: Callable[[timedelta], None]
    abort: Callable[[], None]
    close: Callable[[], None]
    why: str = ""
