"""The network between workers: each worker's card sends and receives at one rate; a lane can be slow, held up or cut.

InprocExchange.carry(parcel) ─▶ when both cards are free ─▶ bytes / rate ─▶ delay ─▶ deliver
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.transports.inproc import InprocExchange, InprocParcel
from protos.values import LaneAddress

STALL_S = 5.0
"""A lane without progress for this long is lost, as in production."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """Rates are bytes per second each way: `rates` by worker, else `rate`. A lane stages about `max_staged_bytes`."""

    rate: float = 50e9
    rates: Mapping[str, float] = field(default_factory=dict)
    delay_s: float = 20e-6
    max_staged_bytes: int = LaneConfig().max_staged_bytes

    def rate_between(self, source: str, destination: str) -> float:
        return min(self.rates.get(source, self.rate), self.rates.get(destination, self.rate))


@dataclass(slots=True, eq=False)
class Condition:
    """The faults of the lane between two workers, for all their incarnations."""

    slowness: float = 1.0
    held: bool = False


class Lanes:
    """`exchange` makes senders and receivers."""

    def __init__(self, cards: Cards) -> None:
        self._loop = asyncio.get_running_loop()
        self.exchange = InprocExchange(self._carry, max_staged_bytes=cards.max_staged_bytes, clock=self._loop.time)
        self.num_bytes = 0
        self._cards = cards
        self._sending: dict[str, float] = {}  # by worker: when its card is free again
        self._receiving: dict[str, float] = {}
        self._conditions: dict[tuple[str, str], Condition] = {}
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}

    def condition(self, source: str, destination: str) -> Condition:
        return self._conditions.setdefault((source, destination), Condition())

    def hold(self, source: str, destination: str) -> None:
        """Nothing arrives until `let_go`."""
        self.condition(source, destination).held = True

    def let_go(self, source: str, destination: str) -> None:
        self.condition(source, destination).held = False
        for deliver in self._held.pop((source, destination), ()):
            deliver()

    def cut(self, source: LaneAddress, destination: LaneAddress) -> None:
        """Parcels under way are lost, and both ends are notified."""
        self._held.pop((source.worker_id, destination.worker_id), None)
        self.exchange.cut(source, destination, "the wire was cut")

    def _carry(self, parcel: InprocParcel, deliver: Callable[[], None]) -> None:
        """Carries a parcel. Parcels of a lane arrive in order: the cards take them one by one."""
        pair = (_worker(parcel.source), _worker(parcel.destination))
        condition = self._conditions.get(pair)
        took_s = parcel.num_bytes / self._cards.rate_between(*pair) * (1.0 if condition is None else condition.slowness)
        source, destination = parcel.source, parcel.destination
        begin_s = max(self._loop.time(), self._sending.get(source, 0.0), self._receiving.get(destination, 0.0))
        self._sending[source] = self._receiving[destination] = begin_s + took_s
        self.num_bytes += parcel.num_bytes
        self._loop.call_at(begin_s + took_s + self._cards.delay_s, self._arrive, pair, deliver)

    def _arrive(self, pair: tuple[str, str], deliver: Callable[[], None]) -> None:
        condition = self._conditions.get(pair)
        if condition is not None and condition.held:
            self._held.setdefault(pair, []).append(deliver)
        else:
            deliver()


def _worker(peer: str) -> str:
    return peer.rpartition("#")[0]
